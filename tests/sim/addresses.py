"""Where a rank of a simulation would call each other rank for the first time: what it was told, or told too late."""

from __future__ import annotations

from collections.abc import Mapping


class Addresses(dict[int, str]):
    """Global rank -> endpoint, as its own rank knows it."""

    def learn(self, endpoints: Mapping[int, str]) -> None:
        """News older than what is known is none."""
        for rank, endpoint in endpoints.items():
            if _generation_of(endpoint) >= _generation_of(self.get(rank, endpoint)):
                self[rank] = endpoint


def _generation_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
