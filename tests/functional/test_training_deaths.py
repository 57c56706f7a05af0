"""The real trainer under `trainmover run`, killed: it ends soon, names the rank, and the next start goes on.

In `make test` a rank dies at each kind of moment; the nightly target does it at many random ones.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from megatron.training import checkpoint_files
from tests.functional.launcher import Jobs, RunningJob, shape

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parents[2] / "pretrain_gpt.py"
END_S_MAX = 5.0
TRAINING = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --max-position-embeddings 32 --seq-length 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 100000 --lr 1e-3 --mock-data --log-interval 1 "
    "--num-workers 0 --eval-iters 2 --eval-interval 7 --pipeline-model-parallel-size 2 --use-distributed-optimizer "
    "--lr-decay-iters 1000 --save-interval 3"
)


def start(jobs: Jobs, folder: Path, *flags: str) -> RunningJob:
    """A job of two machines of two ranks that saves to `folder` every third iteration, for ever."""
    words = (*TRAINING.split(), "--save", str(folder), "--load", str(folder), *flags)
    return jobs.start(SCRIPT, *shape(2, 2), arguments=words)


def pid_of(job: RunningJob, global_rank: int) -> int:
    """The rank's process, by the name that `ps` shows; its helpers have that name too, but do not lead the group."""
    for pid in job.living():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == f"rank {global_rank}\n" and os.getpgid(pid) == pid:
                return pid
    raise AssertionError(f"rank {global_rank} is not running")


def kill_and_check(job: RunningJob, global_rank: int, pid: int) -> None:
    """Kills the rank; the job must end in time, name it, and leave nothing."""
    started_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert job.finish() == 1
    assert time.monotonic() - started_s < END_S_MAX
    closing = "\n".join(job.lines[-4:])
    assert re.search(rf"global rank {global_rank} .*SIGKILL", closing), closing
    job.wait_until_nothing_lives()


def check_goes_on(jobs: Jobs, folder: Path, killed: RunningJob) -> None:
    """The next start must resume from the newest whole checkpoint: at least the one whose saving the job told."""
    newest = checkpoint_files.find_checkpoint(folder).checkpoint
    told = [int(number) for number in re.findall(r"checkpoint at iteration +(\d+) saved", "\n".join(killed.lines))]
    assert not told or (newest is not None and newest.iteration >= max(told))
    job = start(jobs, folder, "--exit-interval", "1")
    assert job.finish() == 0, "\n".join(job.lines[-20:])
    wanted = f"at iteration {newest.iteration}" if newest else "starting at iteration 0"
    assert any(wanted in line for line in job.lines), "\n".join(job.lines)
    assert newest is None or any(f"iteration {newest.iteration + 1:8d}/" in line for line in job.lines)


# What the job's output or folder shows at each kind of moment.
MOMENTS = {
    "after the first steps": r" iteration +2/",
    "about an evaluation": r" iteration +7/",
    "after a save": r"checkpoint at iteration +3 ",
    "about a later save": r" iteration +6/",
}


# Each moment once, in one way of saving or the other; nightly in both.
OFTEN = {
    ("after the first steps", ""),
    ("about an evaluation", ""),
    ("after a save", ""),
    ("about a later save", "--async-save"),
}
DEATHS = [
    pytest.param(
        moment,
        mode,
        id=f"{mode[2:] or 'sync'}-{moment}",
        marks=[] if (moment, mode) in OFTEN else [pytest.mark.nightly],
    )
    for mode in ("", "--async-save")
    for moment in MOMENTS
]


@pytest.mark.parametrize(("moment", "mode"), DEATHS)
def test_a_killed_rank_ends_the_job_and_the_next_start_goes_on(
    jobs: Jobs, tmp_path: Path, moment: str, mode: str
) -> None:
    rank = random.Random(moment + mode).randrange(4)
    job = start(jobs, tmp_path / "ck", *mode.split())
    job.wait_for_lines(MOMENTS[moment], 1)
    kill_and_check(job, rank, pid_of(job, rank))
    check_goes_on(jobs, tmp_path / "ck", job)


def test_a_rank_killed_while_the_job_starts_is_named(jobs: Jobs, tmp_path: Path) -> None:
    job = start(jobs, tmp_path / "ck")
    deadline = time.monotonic() + 60
    while True:
        try:
            pid = pid_of(job, 3)
            break
        except AssertionError:
            assert time.monotonic() < deadline
    kill_and_check(job, 3, pid)
    check_goes_on(jobs, tmp_path / "ck", job)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.nightly)])
def test_a_stop_signal_saves_and_ends_well(jobs: Jobs, tmp_path: Path, number: signal.Signals) -> None:
    job = start(jobs, tmp_path / "ck", "--exit-signal-handler", "--save-interval", "100000")
    job.wait_for_lines(r" iteration +4/", 1)
    job.process.send_signal(number)
    assert job.finish() == 0
    assert any("a signal asked for it" in line for line in job.lines)
    newest = checkpoint_files.find_checkpoint(tmp_path / "ck").checkpoint
    assert newest is not None
    assert newest.iteration >= 4
    job.wait_until_nothing_lives()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(40))
def test_a_rank_killed_at_any_moment_loses_nothing_that_was_saved(jobs: Jobs, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    folder, rank = tmp_path / "ck", chance.randrange(4)
    job = start(jobs, folder, *chance.choice(("", "--async-save")).split())
    job.wait_for_lines(rf" iteration +{chance.randrange(1, 20)}/", 1)
    time.sleep(chance.uniform(0, 0.5))  # the moment itself is what is random here
    kill_and_check(job, rank, pid_of(job, rank))
    check_goes_on(jobs, folder, job)
