"""A rank that was not told of a switch calls the address it knows: its leaver must still be there.

Rank 2 has no link to rank 0, whose machine is replaced; its own agent is cut off, so its table is old.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron.resilience.protocol.invariants import InvariantViolation
from megatron.resilience.protocol.journal import AnyEntry, SwitchDone, SwitchLeft
from megatron.resilience.protocol.messages import Left, RankReport
from megatron.resilience.protocol.switch_drive import SwitchDrive
from tests.sim.controller import LIMITS
from tests.sim.faults import Faults
from tests.sim.job import Job
from tests.sim.process import Process
from tests.sim.run import to_the_end
from tests.sim.scenarios import at_iteration, shape
from tests.sim.world import World

AWAY_MS = 3 * LIMITS.agent_lost_ms
LINK_AFTER_MS = LIMITS.agent_lost_ms + 200


def job_with(arrange: Callable[[Job, Faults], None]) -> Job:
    faults = Faults()
    job = Job(World(1), shape(), faults)
    at_iteration(job, 5, lambda: job.users.migrate("m0"))
    arrange(job, faults)
    return job


def cut_off(job: Job) -> None:
    job.machines["m2"].partition(AWAY_MS)
    job.world.after(LINK_AFTER_MS, job.link_appears, 2, 0)


def controller_dies_before_the_table(job: Job, faults: Faults) -> None:
    def crash(number: int, entry: AnyEntry) -> bool:
        if not isinstance(entry, SwitchLeft):
            return False
        cut_off(job)
        return True

    job.controller.crash_at = crash


def agent_is_cut_off_at_leave(job: Job, faults: Faults) -> None:
    def look(process: Process, report: RankReport) -> None:
        if isinstance(report, Left):
            cut_off(job)

    faults.on_report = look


ARRANGE = [controller_dies_before_the_table, agent_is_cut_off_at_leave]


@pytest.mark.parametrize("arrange", ARRANGE)
def test_a_leaver_is_kept_while_somebody_may_call_it(arrange: Callable[[Job, Faults], None]) -> None:
    job = job_with(arrange)
    back_ms: list[float] = []

    def look() -> None:
        if any(isinstance(entry, SwitchDone) for entry in job.controller.entries):
            back_ms.append(job.world.now_ms - job.machines["m2"].cut_until_ms)
        else:
            job.world.after(1, look)

    look()
    to_the_end(job)
    assert job.controller.ledger.ended_ok
    assert (0, 2) in job.links
    assert 0 < back_ms[0] < 200, "as soon as the machine is back and told"


@pytest.mark.parametrize("arrange", ARRANGE)
def test_a_leaver_that_is_released_earlier_is_called_in_vain(
    arrange: Callable[[Job, Faults], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SwitchDrive, "_table_is_out", lambda self: True)
    with pytest.raises(InvariantViolation, match="global rank 2 calls global rank 0 at m0:1:0:1, which has ended"):
        to_the_end(job_with(arrange))
