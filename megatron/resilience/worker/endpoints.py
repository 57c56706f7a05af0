"""Where the other ranks listen, as the controller's directory tells it, made known to the data plane."""

from __future__ import annotations

from collections.abc import Mapping

import trainmover_ext
from megatron.resilience.protocol.messages import Directory


def make_known(directory: Directory, own_rank: int) -> None:
    """Whoever waits for a connection to a rank that has moved turns to where it is now. Any thread; returns at once."""
    for generation, endpoints in sorted(_by_generation(directory).items()):
        others = {rank: text for rank, text in endpoints.items() if rank != own_rank}
        if others:
            trainmover_ext.add_endpoints(others, generation=generation)


def join_by(directory: Directory, generation: int) -> None:
    """A joiner's first: it takes connections of `generation` from now on."""
    known = _by_generation(directory)
    generations = {rank: since for since, texts in known.items() for rank in texts}
    trainmover_ext.join_switch(generation, directory.endpoints, generations)


def _by_generation(directory: Directory) -> dict[int, Mapping[int, str]]:
    """Generation in which their slots last changed hands -> endpoints by global rank."""
    ranks_per_slot = max(1, len(directory.endpoints) // max(1, len(directory.slot_generations)))
    grouped: dict[int, dict[int, str]] = {}
    for rank, endpoint in directory.endpoints.items():
        grouped.setdefault(directory.slot_generations[rank // ranks_per_slot], {})[rank] = endpoint
    return dict(grouped)
