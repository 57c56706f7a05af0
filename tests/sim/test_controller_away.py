"""The controller is killed at each journal entry: training never stops; what was under way is finished or undone."""

from __future__ import annotations

import pytest

from megatron.resilience.protocol.journal import AnyEntry
from tests.sim.faults import Faults
from tests.sim.job import Job
from tests.sim.run import to_the_end
from tests.sim.scenarios import at_iteration, shape
from tests.sim.world import World

ENTRIES = 12
"""Of one plain migration, from JobStarted to CommandEnded."""
ITERATIONS = 40


def migration(seed: int, *, dies_at: int, away_ms: float) -> Job:
    world = World(seed)
    job = Job(world, shape(), Faults())
    job.controller.downtime_ms = lambda: away_ms
    job.controller.crash_at = lambda number, entry: number == dies_at
    at_iteration(job, 5, lambda: job.users.migrate("m1"))
    return job


def test_a_plain_migration_writes_as_many_entries() -> None:
    job = migration(1, dies_at=0, away_ms=0)
    to_the_end(job)
    names = [type(entry).__name__ for entry in job.controller.entries]
    assert names[-1] == "JobEnded"
    assert len(names) - 1 == ENTRIES


@pytest.mark.parametrize("number", range(2, ENTRIES + 1))
def test_training_goes_on_while_the_controller_is_away(number: int) -> None:
    for seed in range(5):
        job = migration(seed, dies_at=number, away_ms=10_000)
        job.world.run(until=lambda job=job: not job.controller.is_up, limit_ms=5_000)  # type: ignore[misc]
        before, longest_ms, last_ms = job.iterations_done, 0.0, job.world.now_ms
        while job.iterations_done < before + ITERATIONS:
            done = job.iterations_done
            job.world.run(until=lambda job=job, done=done: job.iterations_done > done, limit_ms=9_000)  # type: ignore[misc]
            longest_ms, last_ms = max(longest_ms, job.world.now_ms - last_ms), job.world.now_ms
        assert not job.controller.is_up
        assert longest_ms < 250, "an iteration takes 15 to 60 ms, with a switch in it 40 more"


@pytest.mark.parametrize("number", range(1, ENTRIES + 1))
@pytest.mark.parametrize("away_ms", [1.0, 60.0, 1_000.0])
def test_what_was_under_way_is_finished_or_undone(number: int, away_ms: float) -> None:
    for seed in range(5):
        job = migration(seed, dies_at=number, away_ms=away_ms)
        to_the_end(job)
        ledger = job.controller.ledger
        assert ledger.ended_ok
        assert job.controller.term == 2
        assert [incident.outcome for incident in ledger.incidents.values()] == ["done"]
        assert ledger.table == ["m0", "m4", "m2"], "m4 stands in m1's rack"


def test_a_journal_read_again_gives_the_same_state() -> None:
    job = migration(3, dies_at=0, away_ms=0)
    seen: list[AnyEntry] = []

    def see(number: int, entry: AnyEntry) -> bool:
        seen.append(entry)
        return False

    job.controller.crash_at = see
    to_the_end(job)
    assert seen == job.controller.entries
    again = type(job.controller.ledger)()
    for entry in seen:
        again.apply(entry)
    assert again == job.controller.ledger
