"""Ranks are killed and replaced, operations aborted, generations changed at random moments, while schedules run.

Each operation raises a CollectiveError or its result is right to the bit; no rank hangs; nothing is left behind.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.distributed.collectives import chaos, runner
from tests.distributed.collectives.jobs import ReplaceableJob
from tests.distributed.collectives.schedules import layout_of

pytestmark = pytest.mark.distributed

SIZE = 4
WITNESS = 0
"""Never killed, so that it has seen every round."""
LONGEST_S = 0.25
ROUND_LIMIT_S = 30.0


@dataclass
class Tally:
    """What the rounds have shown."""

    done: list[str] = field(default_factory=list)
    checked: int = 0
    errors: Counter[str] = field(default_factory=Counter)


def one_round(job: ReplaceableJob, chance: random.Random, seed: int, tally: Tally) -> None:
    what = chance.choices(("kill", "abort", "kill two", "both", "resume"), (40, 25, 10, 10, 15))[0]
    tally.done.append(what)
    if what == "resume":
        tally.checked += sum(job.ranks.run(chaos.run_quietly, [(seed, 2)] * SIZE, ROUND_LIMIT_S))
        job.resume({})
        return
    kills = {"kill": 1, "kill two": 2, "both": 1}.get(what, 0)
    killed = chance.sample([rank for rank in range(SIZE) if rank != WITNESS], kills)
    aborting = chance.randrange(SIZE) if what in ("abort", "both") else None
    for number, rank in enumerate(job.ranks):
        rank.start(chaos.run_until_ended, seed, chaos.delay(chance, LONGEST_S) if number == aborting else None)
    for number in killed:
        time.sleep(chaos.delay(chance, LONGEST_S))  # the moment is what is random
        job.ranks[number].kill()
    for number in set(range(SIZE)) - set(killed):
        ended: chaos.Ended = job.ranks[number].result(ROUND_LIMIT_S)
        tally.checked += ended.checked
        tally.errors.update(ended.errors)
        if aborting is None:
            assert ended.culprits <= {*killed}, f"round {len(tally.done)}: killed {killed}, rank {number}: {ended}"
    job.resume(job.replace(killed))


def check_rounds(transport: str, rounds: int, seed: int, folder: Path) -> None:
    chance = random.Random(f"chaos {seed}")
    tally = Tally()
    shared_before = set(os.listdir("/dev/shm"))
    job = ReplaceableJob(transport, layout_of(seed, SIZE), folder)
    with job.ranks as ranks:
        before = ranks.run(chaos.settled_footprint, [(seed, None)] * SIZE)[WITNESS]
        job.resume({})
        for number in range(rounds):
            one_round(job, chance, seed * 1000 + number, tally)
        wanted = [before if rank == WITNESS else None for rank in range(SIZE)]
        after = ranks.run(chaos.settled_footprint, [(seed, footprint) for footprint in wanted])[WITNESS]
        assert after == before, f"what rank {WITNESS} holds has changed in {tally.done}"
        ranks.run(chaos.run_quietly, [(seed, 3)] * SIZE, ROUND_LIMIT_S)
        ranks.run(runner.leave, [()] * SIZE)
        assert ranks[WITNESS].call(chaos.data_plane_descriptors) == [], "left behind at the end"
    assert {name for name in os.listdir("/dev/shm") if "trainmover" in name} <= shared_before
    print(f"{transport}: {Counter(tally.done)}; {tally.checked} right, {dict(tally.errors)}")
    assert tally.checked > 0
    assert set(tally.errors) <= {"PeerLost", "CollectiveAborted"}


@pytest.mark.parametrize("transport", ["shm", "tcp", "machines"])
def test_chaos_ends_in_errors_or_right_results_and_leaves_nothing(transport: str, tmp_path: Path) -> None:
    check_rounds(transport, 20, 1, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("transport", ["shm", "tcp", "machines", "no-cross-memory"])
def test_much_more_chaos(transport: str, seed: int, tmp_path: Path) -> None:
    check_rounds(transport, 100, seed, tmp_path)
