"""A job whose machines can be replaced by newly started processes while it runs. In the test's process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import trainmover_ext
from tests.distributed.collectives.jobs import ReplaceableJob
from tests.distributed.collectives.ranks import Rank
from tests.distributed.collectives.schedules import Layout
from tests.distributed.switch import moves
from tests.distributed.switch.moves import Committed
from trainmover_ext import SwitchPhase

RANKS_A_MACHINE = 2


class SwitchJob(ReplaceableJob):
    """Each slot has two ranks. `wire`: "machines" (shm within, tcp between) or "tcp"."""

    def __init__(self, wire: str, layout: Layout, folder: Path, **more: str) -> None:
        super().__init__(wire, layout, folder, **more)
        self.wire = wire
        self.generations: dict[int, int] = {}
        self.machines = 0
        self.seed = 0
        self.gone: list[Rank] = []

    def seeds(self, count: int) -> list[int]:
        self.seed += count
        return list(range(self.seed, self.seed + count))

    def spares(self, numbers: Sequence[int]) -> dict[int, Rank]:
        """New processes that are not yet anything, those of a slot on one new machine."""
        self.machines += 1
        spares: dict[int, Rank] = {}
        for number in numbers:
            machine = f"machine-new-{self.machines}-{number // RANKS_A_MACHINE}"
            more = {"TRAINMOVER_MACHINE": machine} if self.wire == "machines" else {}
            spares[number] = self.ranks.spare(number, **more)
        return spares

    def build(self, generation: int, spares: Mapping[int, Rank]) -> dict[int, str]:
        """Each builds its groups alone; where they are reached."""
        for number, spare in spares.items():
            spare.start(moves.join_alone, self.layout, number, generation, self.endpoints, self.generations)
        return {number: str(spare.result()) for number, spare in spares.items()}

    def next_generation(self) -> int:
        self.generation += 1
        return self.generation

    def linked_to(self, numbers: Sequence[int]) -> set[int]:
        linked: set[int] = set()
        for number in numbers:
            linked |= set(self.ranks[number].call(trainmover_ext.linked_ranks))
        return linked - set(numbers)

    def others(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in range(self.layout.size) if number not in numbers]

    def prepare(self, generation: int, moved: Mapping[int, str], count: int) -> set[int]:
        """Prepares those who are linked to a leaver, beside `count` schedules of all; who they are."""
        linked = self.linked_to(list(moved))
        seeds = self.seeds(count)
        for number in range(self.layout.size):
            if number in linked:
                self.ranks[number].start(moves.prepare_and_run, generation, moved, seeds)
            else:
                self.ranks[number].start(moves.run, seeds)
        for rank in self.ranks:
            rank.result(120)
        for number in linked:
            self.ranks[number].call(moves.wait_until, SwitchPhase.READY, generation)
        # Schedules may have made a link for the first time: those ranks are asked too, as a lead would.
        later = self.linked_to(list(moved)) - linked
        for number in later:
            self.ranks[number].call(moves.prepare, generation, moved)
            self.ranks[number].call(moves.wait_until, SwitchPhase.READY, generation)
        return linked | later

    def move(self, numbers: Sequence[int], chance: random.Random, *, count: int = 2) -> dict[int, Committed]:
        """Replaces these ranks by new processes, with traffic all the time; what the linked stayers saw."""
        generation = self.next_generation()
        spares = self.spares(numbers)
        moved = self.build(generation, spares)
        linked = self.prepare(generation, moved, count)
        handovers: dict[int, str] = {}
        for number in numbers:
            held, handovers[number] = self.ranks[number].call(moves.hold, generation)
            assert set(held) - set(numbers) <= linked
        return self.switch(generation, moved, linked, handovers, spares, chance)

    def switch(
        self,
        generation: int,
        moved: Mapping[int, str],
        linked: set[int],
        handovers: Mapping[int, str],
        spares: Mapping[int, Rank],
        chance: random.Random,
    ) -> dict[int, Committed]:
        """All at once, each after a moment of its own; then everybody goes on with what the schedules say."""
        seeds = self.seeds(2)

        def moment() -> float:
            return chance.choice((0.0, 0.0, 0.002, 0.02))

        leavers = {number: self.ranks.put(number, spare) for number, spare in spares.items()}
        for number in chance.sample(range(self.layout.size), self.layout.size):
            rank = self.ranks[number]
            if number in moved:
                rank.start(moves.go_live_and_run, generation, handovers[number], moved, seeds, moment())
                leavers[number].start(moves.leave, generation, moment())
            elif number in linked:
                rank.start(moves.commit_and_run, generation, seeds, moment())
            else:
                rank.start(moves.run_and_hear, generation, moved, seeds, 10 * moment())
        for leaver in leavers.values():
            leaver.result()
            self._end_some_time(leaver, chance)
        results = {number: self.ranks[number].result(120) for number in range(self.layout.size)}
        self.endpoints.update(moved)
        self.generations.update(dict.fromkeys(moved, generation))
        return {number: results[number] for number in linked}

    def _end_some_time(self, leaver: Rank, chance: random.Random) -> None:
        """Killed at once, or idle until the job ends."""
        if chance.random() < 0.5:
            leaver.close()
        else:
            self.gone.append(leaver)

    def close(self) -> None:
        for rank in self.gone:
            rank.close()
        self.ranks.close()


@contextmanager
def switch_job(wire: str, layout: Layout, folder: Path, **more: str) -> Iterator[SwitchJob]:
    made = SwitchJob(wire, layout, folder, **more)
    try:
        yield made
    finally:
        made.close()
