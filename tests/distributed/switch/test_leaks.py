"""Many switches in one job: ranks that stay hold at the end what they held early on, not a descriptor more."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections import Counter
from pathlib import Path

import pytest

import trainmover_ext
from tests.distributed.switch import moves
from tests.distributed.switch.switch_job import SwitchJob, switch_job
from tests.distributed.switch.test_moves import SIX, WIRES, check

pytestmark = pytest.mark.distributed

STAYERS = (0, 1)
"""Ranks of the slot that never moves."""
SETTLED = 10
"""Switches after which nothing may grow."""
RESIDENT_KB_MAX = 1024
"""By which the memory of a process may grow in the second half, for the allocator's sake: 20 kB a switch show."""


def held() -> Counter[str]:
    """Descriptors by kind, threads, maps of shared memory, and bytes of the data plane, of this process."""
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{entry}").partition(":")[0]] += 1
        except FileNotFoundError:  # the listing's own
            continue
    found["threads"] = len(os.listdir("/proc/self/task"))
    found["shared maps"] = Path("/proc/self/maps").read_text().count("memfd:")
    found.update(trainmover_ext.memory_stats())
    return found


def resident_kb() -> int:
    """Without shared memory, whose pages count from their first use on."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


def everything(job: SwitchJob) -> dict[int, Counter[str]]:
    return {number: job.ranks[number].call(held) for number in STAYERS}


@pytest.mark.nightly
@pytest.mark.parametrize("wire", WIRES)
def test_a_hundred_switches_leave_nothing_with_those_who_stay(wire: str, tmp_path: Path) -> None:
    chance = moves.chance_of("leaks", wire)
    segments = set(os.listdir("/dev/shm"))
    with switch_job(wire, SIX, tmp_path) as job:
        job.ranks.run(moves.run, [(job.seeds(5),)] * 6)  # all the links that there will be
        resident: list[dict[int, int]] = []
        for number in range(100):
            slot = 1 + number % 2
            check(job.move([2 * slot, 2 * slot + 1], chance, count=0))
            resident.append({rank: job.ranks[rank].call(resident_kb) for rank in STAYERS})
            if number + 1 == SETTLED:
                early = everything(job)
        deadline = time.monotonic() + moves.LIMIT_S
        while grown := [more for rank, late in everything(job).items() if (more := late - early[rank])]:
            assert time.monotonic() < deadline, f"more than after {SETTLED} switches: {grown}"
        for rank in STAYERS:
            kilobytes = [one[rank] for one in resident]
            assert min(kilobytes[-10:]) - max(kilobytes[40:50]) <= RESIDENT_KB_MAX, kilobytes
            print(kilobytes)
    assert set(os.listdir("/dev/shm")) <= segments
