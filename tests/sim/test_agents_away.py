"""Agents that are cut off from the controller for long: training goes on, and so does the switch as soon as it can."""

from __future__ import annotations

from megatron.resilience.protocol.messages import Left, RankReport
from tests.sim.controller import LIMITS
from tests.sim.faults import Faults
from tests.sim.job import Job
from tests.sim.process import Process
from tests.sim.run import to_the_end
from tests.sim.scenarios import at_iteration, shape
from tests.sim.world import World

AWAY_MS = 2 * LIMITS.running_ms


def test_a_joiner_that_is_cut_off_after_leave_costs_no_job() -> None:
    faults = Faults()
    job = Job(World(1), shape(), faults)
    at_iteration(job, 5, lambda: job.users.migrate("m1", to=("m4",)))

    def look(process: Process, report: RankReport) -> None:
        if isinstance(report, Left):
            job.machines["m4"].partition(AWAY_MS)

    faults.on_report = look
    to_the_end(job)
    assert job.world.now_ms > AWAY_MS
    assert job.controller.ledger.ended_ok
    assert [incident.outcome for incident in job.controller.ledger.incidents.values()] == ["done"]
