"""Training processes killed in the middle of a switch, with the real trainer under the real launcher.

A joiner that dies before the point of no return costs nothing: the next candidate takes the slot, and the run equals
one that nobody touched, bit for bit. After it the job ends within seconds with an error that names the rank, and
nothing is left. The ranks kill themselves at named points (`dying_gpt.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from megatron.resilience.agent import shared_memory
from tests.functional.control_job import ROOT
from tests.functional.launcher import LIMIT_S, Jobs, RunningJob
from tests.functional.tiny_training import Untouched, check_equal, start

pytestmark = pytest.mark.distributed

END_S_MAX = 5.0
"""From a death that ends the job to its end."""


def dying(jobs: Jobs, ranks: int, *deaths: str, elastic: int = 2) -> RunningJob:
    """A job whose ranks die as `deaths` say, once it is asked to move machine-1."""
    events = jobs.directory / "run" / "events.jsonl"
    words = ("--events", str(events), *(word for death in deaths for word in ("--die", death)))
    directory = ("--resilience", "--resilience-dir", str(jobs.directory / "run"))
    return start(jobs, ranks, *directory, "--elastic", str(elastic), more=words)


def trainmover(jobs: Jobs, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "megatron.resilience.cli.main", name),
            *("--resilience-dir", str(jobs.directory / "run"), *flags),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )


def incidents(jobs: Jobs) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(trainmover(jobs, "incidents", "--json").stdout)
    return found


def died_s(jobs: Jobs) -> float:
    """When, on the monotonic clock."""
    return float((jobs.directory / "run" / "death").read_text())


def segments() -> set[str]:
    """Files of shared memory that no living process uses."""
    used = shared_memory.names_used_by(int(name) for name in os.listdir("/proc") if name.isdigit())
    return {segment.name for segment in shared_memory.list_segments()} - used


def check_nothing_is_left(jobs: Jobs, job: RunningJob, segments_before: set[str]) -> None:
    job.wait_until_nothing_lives()
    assert segments() <= segments_before
    temporary = [path.name for path in (jobs.directory / "temporary").iterdir()]
    assert [name for name in temporary if not name.startswith("torchinductor_")] == []  # torch's cache, for next time


BEFORE = [
    pytest.param("building", 1, marks=pytest.mark.nightly),
    pytest.param("built", 1, marks=pytest.mark.nightly),
    pytest.param("ready", 1, marks=pytest.mark.nightly),
    pytest.param("receiving", 1),
    *(pytest.param(point, 2, marks=pytest.mark.nightly) for point in ("building", "built", "ready", "receiving")),
]


@pytest.mark.parametrize(("point", "ranks"), BEFORE)
def test_a_joiner_that_dies_before_the_point_of_no_return_costs_nothing(
    jobs: Jobs, untouched: Untouched, point: str, ranks: int
) -> None:
    before = segments()
    job = dying(jobs, ranks, f"{point}:{2 * ranks - 1}")
    moved = trainmover(jobs, "migrate", "--from", "machine-1")
    assert moved.returncode == 0, moved.stdout + moved.stderr
    assert job.finish() == 0
    first, second = incidents(jobs)
    assert (first["outcome"], second["outcome"]) == ("aborted", "done")
    assert first["joiners"] != second["joiners"]
    assert died_s(jobs) > 0
    check_equal(jobs.directory, untouched(ranks))
    check_nothing_is_left(jobs, job, before)


AFTER = [
    pytest.param("told-to-live", 1),
    pytest.param("voting", 1, marks=pytest.mark.nightly),
    *(pytest.param(point, 2, marks=pytest.mark.nightly) for point in ("told-to-live", "voting")),
]


@pytest.mark.parametrize(("point", "ranks"), AFTER)
def test_a_joiner_that_dies_after_it_ends_the_job_at_once_with_its_name(jobs: Jobs, point: str, ranks: int) -> None:
    before, rank = segments(), 2 * ranks - 1
    job = dying(jobs, ranks, f"{point}:{rank}")
    moved = trainmover(jobs, "migrate", "--from", "machine-1")
    check_ends(jobs, job, rank)
    assert moved.returncode == 1
    assert "the job failed" in moved.stdout + moved.stderr
    check_nothing_is_left(jobs, job, before)
    assert "generation 2 on, whose point of no return had passed; start the job again" in "\n".join(job.lines[-4:])
    (incident,) = incidents(jobs)
    assert incident["outcome"] == "failed"
    assert re.search(rf"global rank {rank} on machine machine-\d ended: killed by signal 9", incident["why"])
    assert incident["boundary"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_joiner_that_dies_when_it_has_voted_dies_as_any_rank(jobs: Jobs, ranks: int) -> None:
    """The switch is done or not, by what had been heard."""
    before, rank = segments(), 2 * ranks - 1
    job = dying(jobs, ranks, f"having-voted:{rank}")
    trainmover(jobs, "migrate", "--from", "machine-1")
    check_ends(jobs, job, rank)
    check_nothing_is_left(jobs, job, before)
    assert incidents(jobs)[0]["outcome"] in ("done", "failed")


def check_ends(jobs: Jobs, job: RunningJob, rank: int) -> None:
    """Soon, and with the name of the rank that died."""
    assert job.finish() == 1
    took_s = time.monotonic() - died_s(jobs)
    print(f"ended {took_s:.2f} s after the death")
    assert took_s < END_S_MAX
    closing = "\n".join(job.lines[-4:])
    assert re.search(rf"^trainmover: global rank {rank} on machine \d was killed by signal 9", closing, re.M), closing


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_joiner_that_dies_with_whole_state_ends_in_one_of_the_two_ways(
    jobs: Jobs, untouched: Untouched, ranks: int
) -> None:
    """The verdict is on its way to it: whoever hears of the death first decides."""
    before, rank = segments(), 2 * ranks - 1
    job = dying(jobs, ranks, f"holding-all:{rank}")
    moved = trainmover(jobs, "migrate", "--from", "machine-1")
    if moved.returncode == 0:
        assert job.finish() == 0
        assert [incident["outcome"] for incident in incidents(jobs)] == ["aborted", "done"]
        check_equal(jobs.directory, untouched(ranks))
    else:
        check_ends(jobs, job, rank)
        assert incidents(jobs)[0]["outcome"] == "failed"
    check_nothing_is_left(jobs, job, before)


@pytest.mark.parametrize(
    ("point", "ranks"),
    [pytest.param(point, ranks, marks=pytest.mark.nightly) for point in ("listening", "sending") for ranks in (1, 2)],
)
def test_a_leaver_that_dies_before_it_has_left_ends_the_job_with_its_name(jobs: Jobs, point: str, ranks: int) -> None:
    before, rank = segments(), 2 * ranks - 1
    job = dying(jobs, ranks, f"{point}:{rank}", elastic=1)
    moved = trainmover(jobs, "migrate", "--from", "machine-1")
    check_ends(jobs, job, rank)
    assert moved.returncode == 1
    check_nothing_is_left(jobs, job, before)
    (incident,) = incidents(jobs)
    assert incident["outcome"] in ("aborted", "failed")
    assert f"global rank {rank} on machine machine-1 ended: killed by signal 9" in incident["why"]


@pytest.mark.parametrize(
    ("point", "ranks"),
    [
        pytest.param("left", 1),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("left", 2), ("leaving", 1), ("leaving", 2))),
    ],
)
def test_a_leaver_that_dies_once_it_has_left_is_missed_by_nobody(
    jobs: Jobs, untouched: Untouched, point: str, ranks: int
) -> None:
    before = segments()
    job = dying(jobs, ranks, f"{point}:{2 * ranks - 1}", elastic=1)
    moved = trainmover(jobs, "migrate", "--from", "machine-1")
    assert moved.returncode == 0, moved.stdout + moved.stderr
    assert job.finish() == 0
    assert [incident["outcome"] for incident in incidents(jobs)] == ["done"]
    assert died_s(jobs) > 0
    check_equal(jobs.directory, untouched(ranks))
    check_nothing_is_left(jobs, job, before)
