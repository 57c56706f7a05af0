"""A job is started, obeyed, and ended; what goes wrong in a rank is told with that rank's number."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.collectives.cells import OPS
from benchmarks.collectives.job import Job, JobError
from megatron.resilience.agent.process_tree import read_process

BOTH = {"library": "gloo", "op": "all_reduce", "bytes": 1024}


# A rank that joins and obeys as rank.py does, without a library to import.
TOY_RANK = """
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
stream = connection.makefile("rw")
def answer(reply):
    print(json.dumps(reply), file=stream, flush=True)
answer({"rank": int(sys.argv[2]), "port": 0})
stream.readline()
answer({})
for line in stream:
    message = json.loads(line)
    if message["do"] == "pid":
        answer({"pid": os.getpid(), "rank": int(sys.argv[2])})
    if message["do"] == "fail" and sys.argv[2] == "1":
        print("the last words", flush=True)
        answer({"error": "ValueError: found nothing"})
        break
"""


class ToyJob(Job):
    """A Job whose ranks are toys, started in another order than their numbers."""

    def commands(self) -> list[list[str]]:
        path = str(self._socket_path)
        return [[sys.executable, "-c", TOY_RANK, path, str(number)] for number in reversed(range(self.ranks))]


def make_job(folder: Path, *libraries: str, kind: type[Job] = Job) -> Job:
    return kind("job", ranks=2, libraries=libraries, bytes_max=1 << 20, folder=folder, variables={"A_VARIABLE": "set"})


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Job]:
    job = make_job(tmp_path, "toys", kind=ToyJob)
    try:
        job.start()
        yield job
    finally:
        job.stop()


def pids(job: Job) -> list[int]:
    return [reply["pid"] for reply in job.command({"do": "pid"}, timeout_s=30)]


def test_gloo_does_what_it_is_told(tmp_path: Path) -> None:
    job = make_job(tmp_path, "gloo")
    try:
        job.start()
        for op in OPS:
            assert job.command({**BOTH, "do": "check", "op": op}, timeout_s=30) == [{}, {}]
        replies = job.command({**BOTH, "do": "measure", "iterations": 3}, timeout_s=30)
        assert [len(reply["seconds"]) for reply in replies] == [3, 3]
    finally:
        job.stop()


def test_answers_are_in_the_order_of_ranks(toy: Job) -> None:
    assert [reply["rank"] for reply in toy.command({"do": "pid"}, timeout_s=30)] == [0, 1]
    assert [reply["rank"] for reply in toy.command({"do": "pid"}, timeout_s=30, only=1)] == [0]


def test_stopping_ends_every_rank_and_can_be_repeated(toy: Job, tmp_path: Path) -> None:
    started = pids(toy)
    toy.stop()
    assert [read_process(pid) for pid in started] == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["job.log"]
    toy.stop()


def test_a_rank_that_does_not_end_is_ended(toy: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.collectives.job.STOP_S", 0.2)
    started = pids(toy)
    os.kill(started[1], signal.SIGSTOP)
    toy.stop()
    assert [read_process(pid) for pid in started] == [None, None]


def test_a_message_that_fails_is_told_with_its_rank_and_output(toy: Job) -> None:
    with pytest.raises(JobError, match=r"job job \(toys\): rank 1: ValueError: found nothing(.|\n)*the last words"):
        toy.command({"do": "fail"}, timeout_s=30)


def test_a_rank_that_died_is_told(toy: Job) -> None:
    os.kill(pids(toy)[1], signal.SIGKILL)
    with pytest.raises(JobError, match=r"rank 1 (ended|has gone)"):
        toy.command({"do": "pid"}, timeout_s=30)


def test_a_rank_that_stopped_answering_is_not_waited_for_longer_than_said(toy: Job) -> None:
    stopped = pids(toy)[1]
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(JobError, match="no answer from rank 1 in time"):
        toy.command({"do": "pid"}, timeout_s=0.2)
    os.kill(stopped, signal.SIGCONT)


class DeadJob(Job):
    """A Job whose ranks end at once."""

    def commands(self) -> list[list[str]]:
        return [[sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]] * self.ranks


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    job = make_job(tmp_path, "toys", kind=DeadJob)
    try:
        with pytest.raises(JobError, match=r"process [01] ended with code 3 before it had joined(.|\n)*the reason"):
            job.start()
    finally:
        job.stop()


def test_commands_name_rank_and_variables(tmp_path: Path) -> None:
    commands = make_job(tmp_path, "gloo", "trainmover").commands()
    assert [words[-2:] for words in commands] == [["--rank", "0"], ["--rank", "1"]]
    assert all("A_VARIABLE=set" in words and "gloo,trainmover" in words for words in commands)


@pytest.mark.parametrize(("user", "flag"), [(0, True), (1000, False)])
def test_only_root_tells_mpirun_that_it_is_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, flag: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    (words,) = make_job(tmp_path, "openmpi").commands()
    assert ("--allow-run-as-root" in words) is flag
    assert f"TMPDIR={tmp_path}" in words
    assert "--rank" not in words


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="Open MPI is installed by `make bench`")
def test_open_mpi_does_what_it_is_told_and_leaves_no_file(tmp_path: Path) -> None:
    job = make_job(tmp_path, "openmpi")
    try:
        job.start()
        for op in OPS:
            assert job.command({**BOTH, "do": "check", "op": op, "library": "openmpi"}, timeout_s=30) == [{}, {}]
    finally:
        job.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["job.log"]
