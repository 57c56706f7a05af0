"""A rank that ends right after its last operation disturbs nobody; a helper it forked does not hide its death."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import trainmover_ext
from tests.distributed.collectives import runner
from tests.distributed.collectives.calls import LARGE, Outcome, all_reduce, barrier, try_call
from tests.distributed.collectives.jobs import ReplaceableJob, job
from tests.distributed.collectives.schedules import Layout

pytestmark = pytest.mark.distributed

WIRES = ("shm", "tcp")
LIMIT_S = 5.0

EXITS = ("after destroy", "without")  # then the interpreter's end tells the others


def last_operation(kind: str, count: int) -> str:
    """Empty, or what was wrong with it. Rank 0 is root."""
    groups = runner.groups()
    direct, size, rank = groups.direct, groups.layout.size, groups.rank
    mine = np.full(count, rank + 1.0, np.float32)
    if kind == "broadcast":
        direct.broadcast(mine, root=0)
        wanted = np.ones(count, np.float32)
    elif kind == "all_gather":
        given, mine = mine, np.zeros(count * size, np.float32)
        direct.all_gather(given, mine)
        wanted = np.repeat(np.arange(1, size + 1, dtype=np.float32), count)
    elif kind == "send":
        if rank == 0:
            for to in range(1, size):
                direct.send(mine, to)
        else:
            direct.recv(mine, 0)
        wanted = np.ones(count, np.float32)
    else:
        direct.all_reduce(mine)
        wanted = np.full(count, size * (size + 1) / 2, np.float32)
    return "" if np.array_equal(mine, wanted) else f"{kind} of {count} gave {mine[:4]}"


def finish(kind: str, count: int, way: str) -> None:
    """Takes part, and ends its process at once."""
    wrong = last_operation(kind, count)
    if way == "after destroy":
        runner.leave()
    else:
        atexit._run_exitfuncs()
    sys.stderr.write(wrong)
    sys.stderr.flush()
    os._exit(3 if wrong else 0)


def last_while_another_leaves(kind: str, count: int) -> str:
    try:
        return last_operation(kind, count)
    except trainmover_ext.CollectiveError as error:
        return f"{kind} of {count}: {type(error).__name__}: {error}"


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("way", EXITS)
def test_a_rank_that_ends_after_its_last_operation_disturbs_nobody(wire: str, way: str, tmp_path: Path) -> None:
    replaceable = ReplaceableJob(wire, Layout(size=3, groups=((0, 1, 2),)), tmp_path)
    kinds = ("broadcast", "all_gather", "send", "all_reduce")
    wrong: list[str] = []
    with replaceable.ranks as ranks:
        for number in range(60):
            kind, count = kinds[number % len(kinds)], LARGE if number >= 50 else 200
            ranks.run(barrier, [()] * 3)
            ranks[0].start(finish, kind, count, way)
            for rank in (1, 2):
                ranks[rank].start(last_while_another_leaves, kind, count)
            wrong += [found for rank in (1, 2) if (found := ranks[rank].result())]
            assert ranks[0].exit_code() == 0, ranks[0].text()
            replaceable.resume(replaceable.replace([0]))
    assert not wrong, f"{len(wrong)} times, the first: {wrong[0]}"


def fork_helper() -> int:
    """A child that holds all its parent had, and sleeps."""
    child = os.fork()
    if child == 0:
        time.sleep(120)
        os._exit(0)
    return child


@pytest.mark.parametrize("wire", WIRES)
def test_a_forked_helper_does_not_hide_its_parents_death(wire: str, tmp_path: Path) -> None:
    with job(wire, 2, tmp_path) as ranks:
        ranks.run(all_reduce, [(0,)] * 2)
        helper = ranks[1].call(fork_helper)
        try:
            ranks[0].start(try_call, all_reduce, 0)
            killed_at = time.monotonic()
            ranks[1].kill()
            outcome: Outcome = ranks[0].result()
            print(f"{wire}: {outcome.error} after {(outcome.at - killed_at) * 1000:.0f} ms")
            assert Path(f"/proc/{helper}").exists()
            # Aborted, if the death was known before the call was made.
            assert outcome.error in ("PeerLost", "CollectiveAborted")
            assert outcome.culprit == 1
            assert outcome.at - killed_at < LIMIT_S
        finally:
            os.kill(helper, signal.SIGKILL)
