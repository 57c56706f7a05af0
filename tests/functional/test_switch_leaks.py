"""One training job whose machine moves there and back many times: the rank that stays holds no more than before."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.functional.launcher import Jobs
from tests.functional.test_switch_deaths import segments, trainmover
from tests.functional.test_training_deaths import pid_of
from tests.functional.tiny_training import start

pytestmark = pytest.mark.distributed

MOVES = 16
SETTLED = 4
"""Moves after which nothing may grow."""
RESIDENT_KB_MAX = 1024
"""Of growth, for the allocator's sake."""
LIMIT_S = 10.0


def held(pid: int) -> Counter[str]:
    """Descriptors by kind, threads and maps of shared memory of a process."""
    found: Counter[str] = Counter()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[os.readlink(f"/proc/{pid}/fd/{entry}").partition(":")[0]] += 1
        except FileNotFoundError:  # closed since
            continue
    found["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    found["shared maps"] = Path(f"/proc/{pid}/maps").read_text().count("memfd:")
    return found


def resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


@pytest.mark.nightly
def test_a_slot_that_moves_there_and_back_leaves_nothing_with_who_stays(jobs: Jobs) -> None:
    before = segments()
    flags = ("--resilience", "--resilience-dir", str(jobs.directory / "run"), "--elastic", "1")
    job = start(jobs, 1, *flags, more=("--train-iters", "1000000", "--exit-signal-handler"))
    stayer = pid_of(job, 0)
    resident = []
    for number in range(MOVES):
        moved = trainmover(jobs, "migrate", "--from", f"machine-{1 + number % 2}")
        assert moved.returncode == 0, moved.stdout + moved.stderr
        resident.append(resident_kb(stayer))
        if number + 1 == SETTLED:
            early = held(stayer)
    deadline_s = time.monotonic() + LIMIT_S
    while more := held(stayer) - early:
        assert time.monotonic() < deadline_s, f"more than after {SETTLED} moves: {more}"
    print("resident kB after each move:", resident)
    assert resident[-1] - max(resident[:SETTLED]) <= RESIDENT_KB_MAX
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 0
    job.wait_until_nothing_lives()
    assert segments() <= before
