"""Jobs of several ranks with chosen groups, for tests that then do something to them. In the test's process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.distributed.collectives import runner
from tests.distributed.collectives.ranks import Ranks, environments
from tests.distributed.collectives.schedules import Layout

TOKEN = "a token that only these tests know"


@contextmanager
def job(transport: str, size: int, folder: Path, *groups: Sequence[int], **more: str) -> Iterator[Ranks]:
    """`size` ranks that have found each other in a store. `groups`: besides the world; `more`: environment."""
    layout = Layout(size=size, groups=(tuple(range(size)), *map(tuple, groups)))
    with Ranks(environments(transport, size, **more), folder / "logs") as ranks:
        ranks.run(runner.join, [(layout, rank, folder / "store") for rank in range(size)])
        yield ranks


class ReplaceableJob:
    """A job whose ranks were built alone, so that each can be replaced by another process that takes its rank."""

    def __init__(self, transport: str, layout: Layout, folder: Path, **more: str) -> None:
        self.layout = layout
        self.generation = 1
        self._everybody = [(layout, rank) for rank in range(layout.size)]
        self.ranks = Ranks(
            environments(transport, layout.size, TRAINMOVER_MODE="isolated", TRAINMOVER_TOKEN=TOKEN, **more),
            folder / "logs",
        )
        try:
            self.endpoints: dict[int, str] = dict(enumerate(self.ranks.run(runner.join_alone, self._everybody)))
            self.resume(self.endpoints)
        except BaseException:
            self.ranks.close()
            raise

    def resume(self, changed: dict[int, str]) -> None:
        """All ranks enter the next generation. Those whose endpoints have changed learn everybody's."""
        self.generation += 1
        told = [self.endpoints if rank in changed else changed for rank in range(self.layout.size)]
        self.ranks.run(runner.meet, [(endpoints, self.generation) for endpoints in told])

    def replace(self, numbers: Sequence[int]) -> dict[int, str]:
        """Other processes for these ranks, built alone; returns their endpoints, for `resume`."""
        for number in numbers:
            self.ranks.replace(number).start(runner.join_alone, self.layout, number)
        changed = {number: self.ranks[number].result() for number in numbers}
        self.endpoints.update(changed)
        return changed
