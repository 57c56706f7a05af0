"""A second agent is started by mistake with the name of a machine that trains: it changes nothing, whenever it asks."""

from __future__ import annotations

import pytest

from tests.sim.faults import Faults
from tests.sim.job import Job
from tests.sim.machine import SimMachine
from tests.sim.run import to_the_end
from tests.sim.scenarios import at_iteration, shape
from tests.sim.world import World

SEEDS = 5
HEARD_MS = 1_000.0
"""Until it has asked again, and hears that the job is over."""
ENTRIES = 11
"""Of one plain migration, from JobStarted to CommandEnded."""


@pytest.mark.parametrize("name", ["m0", "m1", "m2"])
@pytest.mark.parametrize("dies_at", [0, *range(2, ENTRIES + 1)])
def test_a_second_agent_takes_nobodys_place(name: str, dies_at: int) -> None:
    """Also not while the controller comes back, or the connection of the first is lost for a moment."""
    for seed in range(SEEDS):
        job = Job(World(seed), shape(), Faults())
        job.controller.crash_at = lambda number, entry: number == dies_at
        seconds: list[SimMachine] = []

        def second(job: Job = job, seconds: list[SimMachine] = seconds) -> None:
            seconds.append(SimMachine(job, name, rack="a", elastic=False, starts_before=5))

        at_iteration(job, 3, second)
        at_iteration(job, 5, lambda job=job: job.users.migrate("m1"))  # type: ignore[misc]
        at_iteration(job, 20, lambda job=job: job.machines[name].disconnect())  # type: ignore[misc]
        to_the_end(job)
        ledger = job.controller.ledger
        assert ledger.ended_ok, ledger.ended_why
        assert ledger.table == ["m0", "m4", "m2"], "m4 stands in m1's rack"
        assert seconds[0].core.started == set()
        limit_ms = job.world.now_ms + HEARD_MS
        job.world.run(until=lambda seconds=seconds: bool(seconds[0].core.stopped), limit_ms=limit_ms)  # type: ignore[misc]
