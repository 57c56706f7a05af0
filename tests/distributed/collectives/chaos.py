"""What a rank of test_chaos.py runs: schedules until something ends them, and a count of what the process holds."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import trainmover_ext
from tests.distributed.collectives.runner import Runner, groups, seed_for

_ROUND_LIMIT_S = 25.0
_SETTLE_LIMIT_S = 10.0


@dataclass
class Ended:
    """How a round ended on one rank."""

    checked: int = 0
    """Operations that ended well, with the right bits."""
    errors: list[str] = field(default_factory=list)
    """Classes of the errors of all others."""
    culprits: set[int | None] = field(default_factory=set)
    message: str = ""
    """Of the first."""


def culprit_of(error: BaseException) -> int | None:
    if isinstance(error, trainmover_ext.PeerLost):
        return error.global_rank
    return error.culprit if isinstance(error, trainmover_ext.CollectiveAborted) else None


def run_until_ended(seed: int, abort_after_s: float | None) -> Ended:
    """Schedules without end, until an error comes. `abort_after_s`: it comes from here, on another thread."""
    ended = Ended()
    timer = None
    if abort_after_s is not None:
        timer = threading.Timer(abort_after_s, trainmover_ext.abort_collectives, kwargs={"reason": "chaos"})
        timer.start()
    watchdog = threading.Timer(_ROUND_LIMIT_S * 0.8, tell_what_has_not_ended)
    watchdog.start()
    deadline = time.monotonic() + _ROUND_LIMIT_S
    number = 0
    while not ended.errors:
        assert time.monotonic() < deadline, "no error reached this rank"
        schedule = Runner(seed_for(seed, number))
        number += 1
        errors: list[BaseException] = []
        try:
            schedule.run(12)
        except trainmover_ext.CollectiveError as error:
            errors = [error, *schedule.end_all()]
        ended.checked += schedule.checked
        ended.errors += [type(error).__name__ for error in errors]
        ended.message = str(errors[0]) if errors else ""
        ended.culprits |= {culprit_of(error) for error in errors}
    watchdog.cancel()
    if timer is not None:
        timer.join(10)
    return ended


def tell_what_has_not_ended() -> None:
    """For whoever reads the log of a rank that hangs."""
    records = [record for record in trainmover_ext.flight_records() if record["state"] not in ("completed", "failed")]
    print(f"generation {trainmover_ext.generation()}, not ended: {records}", file=sys.stderr, flush=True)


def run_quietly(seed: int, number: int) -> int:
    """`number` schedules that nothing disturbs."""
    return sum(Runner(seed_for(seed, index)).run(12) for index in range(number))


Footprint = dict[str, dict[str, int]]


def footprint() -> Footprint:
    """What this process holds."""
    gc.collect()
    descriptors: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            descriptors[os.readlink(f"/proc/self/fd/{entry}").split(":")[0].split(" ")[0]] += 1
        except FileNotFoundError:  # the listing's own
            continue
    threads = Counter(
        Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")
    )
    mapped = sum("memfd:trainmover" in line for line in Path("/proc/self/maps").read_text().splitlines())
    memory = trainmover_ext.memory_stats()
    return {
        "descriptors": dict(descriptors),
        "threads": dict(threads),
        "mapped": {"segments": mapped},
        "memory": memory,
    }


def settled_footprint(seed: int, wanted: Footprint | None) -> Footprint:
    """After a long schedule, the same each time: as many links as ever. Waits until it is `wanted`, for some time."""
    Runner(seed).run(80)
    groups().direct.barrier()
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    last, same = footprint(), 0
    while last != wanted and same < 5 and time.monotonic() < deadline:
        time.sleep(0.1)
        found = footprint()
        same = same + 1 if found == last and wanted is None else 0
        last = found
    return last


def data_plane_descriptors() -> list[str]:
    """Those open in this process that could only be the data plane's: memory, events."""
    gc.collect()
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(("/memfd:trainmover", "anon_inode:[event")):
            found.append(target)
    return found


def delay(chance: random.Random, longest_s: float) -> float:
    """Short ones more often."""
    return longest_s * chance.random() ** 2
