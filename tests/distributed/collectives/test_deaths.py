"""Who notices that a rank has died, stopped, left or cannot be reached; what each gets to hear, and how soon."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import trainmover_ext
from tests.distributed.collectives import runner
from tests.distributed.collectives.calls import LARGE, Outcome, all_reduce, barrier, receive, send, try_call
from tests.distributed.collectives.jobs import ReplaceableJob, job
from tests.distributed.collectives.ranks import Ranks
from tests.distributed.collectives.schedules import Layout

pytestmark = pytest.mark.distributed

WIRES = ("shm", "tcp")
LIMIT_S = 5.0
"""For what should take some milliseconds: this machine may be busy."""
SILENCE_MS = 1500


def abort_while_blocked(after_s: float, function: Callable[..., object], *arguments: object) -> float:
    """Seconds from the abort, on another thread, to its arrival in the blocked call."""
    aborted_at: list[float] = []

    def note_and_abort() -> None:
        aborted_at.append(time.monotonic())
        trainmover_ext.abort_collectives(reason="test")

    timer = threading.Timer(after_s, note_and_abort)
    timer.start()
    outcome = try_call(function, *arguments)
    timer.join()
    assert outcome.error == "CollectiveAborted", outcome
    return outcome.at - aborted_at[0]


def abort() -> None:
    trainmover_ext.abort_collectives(reason="test")


BLOCKED: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
    "all_reduce": (all_reduce, (0,)),
    "large all_reduce": (all_reduce, (0, LARGE)),
    "recv": (receive, (0, 1)),
    "large send": (send, (0, 1, LARGE)),
    "barrier of a Communicator": (barrier, ()),
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("warm", [True, False], ids=["linked", "not yet linked"])
def test_an_abort_on_another_thread_frees_a_blocked_call(wire: str, warm: bool, tmp_path: Path) -> None:
    layout = Layout(size=2, groups=((0, 1),))
    replaceable = ReplaceableJob(wire, layout, tmp_path)
    with replaceable.ranks as ranks:
        for name, (function, arguments) in BLOCKED.items():
            if warm:
                ranks.run(all_reduce, [(0,)] * 2)
                ranks.run(barrier, [()] * 2)
            took = ranks[0].call(abort_while_blocked, 0.1, function, *arguments)
            print(f"{wire}, {name}: {took * 1000:.1f} ms")
            assert took < 1.0
            replaceable.resume({})
        ranks.run(all_reduce, [(0, LARGE)] * 2)


CHAIN = ((0, 1), (1, 2), (2, 3))


def link_chain(ranks: Ranks) -> None:
    """Links 0-1, 1-2, 2-3 and no other."""
    for index, members in enumerate(CHAIN):
        for member in members:
            ranks[member].start(all_reduce, index + 1)
        for member in members:
            ranks[member].result()


def block_chain(ranks: Ranks, *, dying: bool = True) -> None:
    """Rank 3 does not come to its group with 2; 0 waits for 1, and 1 for 0: neither has anything to do with 3."""
    if not dying:
        ranks[3].start(try_call, receive, 3, 0)
    ranks[2].start(try_call, all_reduce, 3)
    ranks[1].start(try_call, receive, 1, 0)
    ranks[0].start(try_call, receive, 1, 1)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("repetition", range(3))
def test_a_killed_rank_is_lost_to_its_peer_and_blamed_to_the_others(wire: str, repetition: int, tmp_path: Path) -> None:
    with job(wire, 4, tmp_path, *CHAIN) as ranks:
        link_chain(ranks)
        block_chain(ranks)
        time.sleep(0.1 * repetition)
        killed_at = time.monotonic()
        ranks[3].kill()
        outcomes: list[Outcome] = [ranks[number].result() for number in range(3)]
        print(f"{wire}:", [f"{outcome.error} after {(outcome.at - killed_at) * 1000:.0f} ms" for outcome in outcomes])
        assert [outcome.error for outcome in outcomes] == ["CollectiveAborted", "CollectiveAborted", "PeerLost"]
        assert [outcome.culprit for outcome in outcomes] == [3, 3, 3]
        assert all(outcome.at - killed_at < LIMIT_S for outcome in outcomes)


@pytest.mark.parametrize("wire", WIRES)
def test_a_killed_rank_is_lost_to_who_calls_it_for_the_first_time(wire: str, tmp_path: Path) -> None:
    with job(wire, 4, tmp_path, *CHAIN) as ranks:
        ranks[3].kill()
        for error in ("PeerLost", "CollectiveAborted"):
            called_at = time.monotonic()
            outcome: Outcome = ranks[2].call(try_call, all_reduce, 3)
            print(f"{wire}: {outcome.error} after {outcome.at - called_at:.2f} s")
            assert (outcome.error, outcome.culprit) == (error, 3)
            assert outcome.at - called_at < LIMIT_S


@pytest.mark.parametrize("wire", WIRES)
def test_a_stopped_rank_is_noticed_within_the_limit(wire: str, tmp_path: Path) -> None:
    with job(wire, 4, tmp_path, *CHAIN, TRAINMOVER_PEER_TIMEOUT_MS=str(SILENCE_MS)) as ranks:
        link_chain(ranks)
        block_chain(ranks, dying=False)
        stopped_at = time.monotonic()
        ranks[3].signal(signal.SIGSTOP)
        outcomes: list[Outcome] = [ranks[number].result(SILENCE_MS / 1000 + LIMIT_S) for number in range(3)]
        took = [outcome.at - stopped_at for outcome in outcomes]
        print(f"{wire}:", [f"{outcome.error} after {s:.2f} s" for outcome, s in zip(outcomes, took, strict=True)])
        assert [outcome.error for outcome in outcomes] == [
            "CollectiveAborted",
            "CollectiveAborted",
            "CollectiveTimeout",
        ]
        assert all(SILENCE_MS / 1000 * 0.7 < seconds < SILENCE_MS / 1000 + LIMIT_S for seconds in took)
        assert [outcome.culprit for outcome in outcomes[:2]] == [3, 3]
        assert "global rank 3 gave no sign of life" in outcomes[2].message
        ranks[3].signal(signal.SIGCONT)
        assert ranks[3].result(SILENCE_MS / 1000 + LIMIT_S).error != "none"


@pytest.mark.parametrize("wire", WIRES)
def test_ranks_that_only_compute_are_not_taken_for_dead(wire: str, tmp_path: Path) -> None:
    """Twice the limit without a call, in a loop that keeps the interpreter's lock."""
    with job(wire, 2, tmp_path, TRAINMOVER_PEER_TIMEOUT_MS="600") as ranks:
        ranks.run(all_reduce, [(0,)] * 2)
        ranks[1].start(try_call, all_reduce, 0)
        ranks[0].call(compute, 1.3)
        assert ranks[0].call(try_call, all_reduce, 0).error == "none"
        assert ranks[1].result().error == "none"


def compute(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(100_000))


@pytest.mark.parametrize("wire", WIRES)
def test_whoever_calls_after_an_abort_it_could_not_hear_of_is_told(wire: str, tmp_path: Path) -> None:
    """Rank 1 had no connection to rank 0 when that one aborted; its first call to it ends, and soon."""
    with job(wire, 2, tmp_path) as ranks:
        ranks[0].call(abort)
        started_at = time.monotonic()
        outcome: Outcome = ranks[1].call(try_call, all_reduce, 0, limit_s=20)
        print(f"{wire}: {outcome.error} after {outcome.at - started_at:.2f} s: {outcome.message}")
        assert outcome.error == "CollectiveAborted"
        assert outcome.at - started_at < LIMIT_S


def resume_and_abort(generation: int) -> None:
    trainmover_ext.resume(generation)
    abort()


@pytest.mark.parametrize("wire", WIRES)
def test_whoever_enters_a_generation_that_has_ended_already_is_told(wire: str, tmp_path: Path) -> None:
    """Rank 1 is still in the generation before when the abort of the next one comes."""
    with job(wire, 2, tmp_path) as ranks:
        ranks.run(all_reduce, [(0,)] * 2)
        ranks[0].call(resume_and_abort, 5)
        time.sleep(0.3)  # until it has come: there is nothing to see of it
        ranks[1].call(trainmover_ext.resume, 5)
        started_at = time.monotonic()
        outcome: Outcome = ranks[1].call(try_call, all_reduce, 0, limit_s=20)
        print(f"{wire}: {outcome.error} after {outcome.at - started_at:.2f} s: {outcome.message}")
        assert outcome.error == "CollectiveAborted"
        assert outcome.at - started_at < LIMIT_S


def abort_resume_reduce(generation: int) -> Outcome:
    trainmover_ext.abort_collectives(reason=f"end of {generation - 1}")
    trainmover_ext.resume(generation)
    return try_call(all_reduce, 0)


@pytest.mark.parametrize("wire", WIRES)
def test_an_abort_does_not_reach_into_the_next_generation(wire: str, tmp_path: Path) -> None:
    with job(wire, 2, tmp_path) as ranks:
        ranks.run(all_reduce, [(0,)] * 2)
        for generation in range(2, 52):
            for outcome in ranks.run(abort_resume_reduce, [(generation,)] * 2):
                assert outcome.error == "none", f"in generation {generation}: {outcome.message}"


def favour_main_thread(favour: bool) -> None:
    """Of this process: its other threads get a processor only when nobody wants it."""
    processors = {min(os.sched_getaffinity(0))} if favour else set(range(os.cpu_count() or 1))
    for task in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(task, processors)
        if task != os.getpid():
            os.sched_setscheduler(task, os.SCHED_IDLE if favour else os.SCHED_OTHER, os.sched_param(0))


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "XZ"
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill_and_meet(pid: int, endpoints: dict[int, str], generation: int) -> Outcome:
    """Enters the next generation with the successor of `pid` before this process's own threads hear of its death."""
    favour_main_thread(True)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while not is_dead(pid):
        assert time.monotonic() < deadline
    runner.meet(endpoints, generation)
    favour_main_thread(False)
    return try_call(all_reduce, 0)


@pytest.mark.parametrize("wire", WIRES)
def test_the_death_of_a_process_whose_rank_another_holds_is_old_news(wire: str, tmp_path: Path) -> None:
    for attempt in range(5):
        replaceable = ReplaceableJob(wire, Layout(size=2, groups=((0, 1),)), tmp_path / str(attempt))
        with replaceable.ranks as ranks:
            ranks.run(all_reduce, [(0,)] * 2)
            with closing(ranks.spare(0)) as successor:
                endpoint = successor.call(runner.join_alone, replaceable.layout, 0)
                ranks[1].start(kill_and_meet, ranks[0].pid, {0: endpoint}, 3)
                successor.call(runner.meet, {**replaceable.endpoints, 0: endpoint}, 3)
                successor.start(try_call, all_reduce, 0)
                outcomes: list[Outcome] = [rank.result() for rank in (ranks[1], successor)]
                assert [outcome.error for outcome in outcomes] == ["none", "none"], outcomes


def start_while_aborting(rounds: int) -> int:
    """Another thread aborts while the first operations of many groups are started, one each; how many there were."""
    chance = random.Random(3)
    handles = runner.groups().handles
    started = 0
    for _ in range(rounds):
        trainmover_ext.resume(trainmover_ext.generation() + 1)
        aborting = threading.Thread(target=trainmover_ext.abort_collectives, kwargs={"reason": "test"})
        abort_at = chance.randrange(len(handles))
        works = []
        for number, handle in enumerate(handles):
            if number == abort_at:
                aborting.start()
            with suppress(trainmover_ext.CollectiveAborted):
                works.append(handle.send([torch.ones(4)], 1, 9))
        aborting.join()
        deadline = time.monotonic() + LIMIT_S
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < deadline, f"of {len(works)} operations, some have not ended"
        started += len(works)
    return started


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_started_while_an_abort_comes_ends_too(wire: str, tmp_path: Path) -> None:
    with job(wire, 2, tmp_path, *[(0, 1)] * 30) as ranks:
        assert ranks[0].call(start_while_aborting, 500) > 0


def receive_for(milliseconds: int) -> float:
    started_at = time.monotonic()
    with pytest.raises(trainmover_ext.CollectiveTimeout, match="did not end within its time-out"):
        runner.groups().direct.recv(np.zeros(4), 1, timeout_ms=milliseconds)
    return time.monotonic() - started_at


def reduce_for(milliseconds: int) -> float:
    started_at = time.monotonic()
    with pytest.raises(trainmover_ext.CollectiveTimeout, match="waiting for global ranks 1"):
        runner.groups().direct.all_reduce(np.zeros(4), timeout_ms=milliseconds)
    return time.monotonic() - started_at


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("call", [receive_for, reduce_for])
def test_an_operation_ends_within_its_own_time_out(wire: str, call: Callable[[int], float], tmp_path: Path) -> None:
    with job(wire, 2, tmp_path) as ranks:
        ranks.run(barrier, [()] * 2)
        assert 0.25 < ranks[0].call(call, 300) < 0.3 + LIMIT_S
        # The generation has ended, for the other rank too.
        assert ranks[1].call(try_call, barrier).error == "CollectiveAborted"
