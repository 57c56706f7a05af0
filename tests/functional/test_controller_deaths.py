"""The controller killed at each step of a migration while the real trainer trains: no rank waits for it.

The migration is finished or undone by the controller that follows, and the run equals one that nobody touched, bit for
bit. Controller and agents are started by hand, so that the test says when another controller comes.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.resilience.proof.compare import last_iteration
from megatron.resilience.protocol.messages import Finished
from tests.functional import tiny_training
from tests.functional.control_job import ControlJob
from tests.functional.test_control_plane import PLAIN

pytestmark = pytest.mark.distributed

Make = Callable[..., ControlJob]


@pytest.fixture(name="make")
def make_fixture(tmp_path: Path) -> Iterator[Make]:
    made: list[ControlJob] = []

    def make(*flags: str, elastic: int) -> ControlJob:
        """Two machines of one rank that train."""
        job = ControlJob(tmp_path, slots=2, per_machine=1, elastic=elastic)
        made.append(job)
        job.environment = {"OMP_NUM_THREADS": "1"}
        job.script = (
            *(str(tiny_training.SCRIPT), *tiny_training.arguments(tmp_path)),
            *("--events", str(job.resilience.events), "--never-wait", *flags),
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            job.master_port = free.getsockname()[1]
        return job

    yield make
    for job in made:
        job.end()


def reached(job: ControlJob) -> int:
    return last_iteration(tiny_training.records_in(job.directory))


def goes_on(job: ControlJob, iterations: int) -> None:
    target = reached(job) + iterations
    job.until(lambda: reached(job) >= target, f"iteration {target}")


STEPS = [
    pytest.param(step, half, (), marks=() if (step, half) == ("SwitchGo:1", False) else pytest.mark.nightly)
    for step in PLAIN
    for half in (True, False)
]
UNDONE_STEPS = [
    pytest.param("SwitchAborted:1", half, ("--die", "building:1"), marks=pytest.mark.nightly) for half in (True, False)
]


@pytest.mark.parametrize(("step", "half", "flags"), [*STEPS, *UNDONE_STEPS])
def test_training_never_waits_for_a_controller_that_was_killed(
    make: Make, untouched: tiny_training.Untouched, step: str, half: bool, flags: tuple[str, ...]
) -> None:
    """`half`: just before the entry is on disk."""
    job = make(*flags, elastic=2)
    job.start(die_at=step, half=half)
    job.wait_for("running")
    goes_on(job, 1)
    migration = job.migrate("machine-1", command_id="the-one")
    assert job.controllers[0].wait() == -signal.SIGKILL
    goes_on(job, 3)
    job.start_controller()
    finished = migration.result()
    assert isinstance(finished, Finished), finished
    assert finished.ok, finished.text
    for name, agent in job.agents.items():
        assert agent.wait() == 0, f"{name}\n{job.texts()}"
    assert job.controllers[1].wait() == 0
    job.wait_until_nothing_lives()
    outcomes = [incident.outcome for incident in job.ledger().all_incidents()]
    assert outcomes[-1:] == ["done"]
    assert "aborted" in outcomes or not flags
    tiny_training.check_equal(job.directory, untouched(1))
