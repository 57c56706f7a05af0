"""Machines are replaced by newly started processes while random collectives go on; every result equal bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainmover_ext
from megatron.resilience.protocol.delta_plan import EMPTY, plans
from tests.distributed.collectives.schedules import Layout
from tests.distributed.switch import moves
from tests.distributed.switch.moves import Committed
from tests.distributed.switch.switch_job import SwitchJob, switch_job

pytestmark = pytest.mark.distributed

WIRES = ("machines", "tcp")
SIX = Layout(
    size=6, groups=(tuple(range(6)), (0, 1), (2, 3), (4, 5), (0, 2, 4), (1, 3, 5), (0, 1, 2, 3), (2, 5), (1, 4))
)


def check(committed: dict[int, Committed]) -> None:
    assert committed
    for number, seen in committed.items():
        links = seen.tally.links
        assert links.replaced > 0, number
        # Only a link that came up after the preparation may be dropped, to connect again when it is used next.
        assert links.dropped <= seen.links_before - seen.links_prepared_for, number
        assert links.kept + links.replaced >= seen.links_prepared_for, number
        # Whoever is ahead may already link itself to this rank for what comes next.
        assert seen.links_before <= links.kept + links.replaced + links.dropped <= seen.links_after + links.dropped


def move_again_and_again(job: SwitchJob, times: int, seed: int) -> list[float]:
    """Each time another slot; how long the commits took, in microseconds."""
    chance = moves.chance_of("moves", seed)
    job.ranks.run(moves.run, [(job.seeds(3),)] * 6)
    took: list[float] = []
    for _ in range(times):
        slot = chance.randrange(3)
        committed = job.move([2 * slot, 2 * slot + 1], chance)
        check(committed)
        took += [seen.took_us for seen in committed.values()]
    return sorted(took)


@pytest.mark.parametrize("wire", WIRES)
def test_one_machine_after_the_other_is_replaced_while_traffic_goes_on(wire: str, tmp_path: Path) -> None:
    with switch_job(wire, SIX, tmp_path) as job:
        took = move_again_and_again(job, 8, 1)
        print(f"{wire}: commits took {took[len(took) // 2]:.0f} us, at most {took[-1]:.0f}")
        assert took[len(took) // 2] < 5000


@pytest.mark.nightly
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("seed", range(4))
def test_some_hundred_moves(wire: str, seed: int, tmp_path: Path) -> None:
    with switch_job(wire, SIX, tmp_path) as job:
        assert move_again_and_again(job, 60, seed)


@pytest.mark.parametrize("wire", WIRES)
def test_two_machines_move_at_once_and_the_third_after_them(wire: str, tmp_path: Path) -> None:
    with switch_job(wire, SIX, tmp_path) as job:
        chance = moves.chance_of("two", wire)
        job.ranks.run(moves.run, [(job.seeds(3),)] * 6)
        for slots in ((0, 2), (1, 2), (1,), (0, 1)):
            committed = job.move([number for slot in slots for number in (2 * slot, 2 * slot + 1)], chance)
            check(committed)
            assert set(committed).isdisjoint(2 * slot for slot in slots)


PAIRS = Layout(size=6, groups=(tuple(range(6)), (0, 1), (0, 2), (0, 4), (1, 5), (2, 3), (2, 4), (3, 5)))


def test_commits_do_what_the_delta_plan_says(tmp_path: Path) -> None:
    """Of communicators of two ranks, in which a rank's one link tells whose it is."""
    with switch_job("tcp", PAIRS, tmp_path) as job:
        job.ranks.run(moves.run, [(job.seeds(6),)] * 6)
        then = {number: job.ranks[number].call(moves.links_by_communicator) for number in range(6)}
        shared = [set(then[a]) & set(then[b]) - {name for c in range(6) if c not in (a, b) for name in then[c]}
                  for a, b in PAIRS.groups[1:]]  # fmt: skip
        used = [
            (name, a, b)
            for (a, b), names in zip(PAIRS.groups[1:], shared, strict=True)
            for name in names
            if then[a][name]
        ]
        assert all(then[b][name] for name, _, b in used), "both ends have a link"
        planned = plans(used, frozenset({4, 5}))
        committed = job.move([4, 5], moves.chance_of("plan"), count=0)
        replaced = {
            number: {
                name: tally.replaced for name, tally in seen.tally.communicators.items() if name in set().union(*shared)
            }
            for number, seen in committed.items()
        }
        for number, told in replaced.items():
            deltas = planned.get(number, EMPTY).communicators
            assert {name: count for name, count in told.items() if count} == {
                name: len(delta.added) for name, delta in deltas.items()
            }
        assert any(planned[number].replaced for number in committed if number in planned), "or it shows nothing"


@pytest.mark.parametrize("wire", WIRES)
def test_memory_of_stayers_is_the_same_before_and_after(wire: str, tmp_path: Path) -> None:
    with switch_job(wire, SIX, tmp_path) as job:
        chance = moves.chance_of("memory", wire)
        job.ranks.run(moves.run, [(job.seeds(12),)] * 6)
        before = {number: job.ranks[number].call(trainmover_ext.memory_stats) for number in range(4)}
        for seen in job.move([4, 5], chance, count=0).values():
            assert seen.memory_after == seen.memory_before
        after = {number: job.ranks[number].call(trainmover_ext.memory_stats) for number in range(4)}
        assert after == before
