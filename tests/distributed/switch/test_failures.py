"""What goes wrong in a switch, and what does not count as going wrong: deaths of joiner and leaver, aborts, silence."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import trainmover_ext
from tests.distributed.collectives import runner
from tests.distributed.collectives.calls import all_reduce, try_call
from tests.distributed.collectives.ranks import Rank
from tests.distributed.collectives.schedules import Layout
from tests.distributed.switch import moves
from tests.distributed.switch.switch_job import SwitchJob, switch_job
from trainmover_ext import SwitchError, SwitchPhase

pytestmark = pytest.mark.distributed

WIRES = ("machines", "tcp")
FOUR = Layout(size=4, groups=((0, 1, 2, 3), (0, 2), (1, 3), (0, 1), (2, 3)))
LEAVERS = (2, 3)


def everybody_is_well(job: SwitchJob) -> None:
    assert not any(rank.call(moves.is_aborted) for rank in job.ranks)
    job.ranks.run(moves.run, [(job.seeds(1),)] * job.layout.size)


def broken(generation: int) -> str:
    """Why, once it is."""
    deadline = time.monotonic() + moves.LIMIT_S
    while (state := trainmover_ext.switch_state(generation)).phase is not SwitchPhase.BROKEN:
        assert time.monotonic() < deadline, state
        time.sleep(0.001)
    return state.reason


def kill_during_prepare(job: SwitchJob, after_s: float, *, ready: bool) -> None:
    """A joiner that dies when all is prepared, or a moment after it began; then the next candidate, which moves in."""
    generation = job.next_generation()
    spares = job.spares(LEAVERS)
    moved = job.build(generation, spares)
    stayers = job.linked_to(LEAVERS)
    for number in stayers:
        job.ranks[number].call(moves.prepare, generation, moved)
    if ready:
        for number in stayers:
            job.ranks[number].call(moves.wait_until, SwitchPhase.READY, generation)
    for rank in job.ranks:
        rank.start(moves.run, [generation])
    time.sleep(after_s)
    for spare in spares.values():
        spare.close()
    for rank in job.ranks:
        rank.result(60)
    for number in stayers:
        assert "global rank" in job.ranks[number].call(broken, generation)
        job.ranks[number].call(trainmover_ext.abort_switch, generation)
        job.ranks[number].call(trainmover_ext.abort_switch, generation)
    everybody_is_well(job)


@pytest.mark.parametrize("wire", WIRES)
def test_a_joiner_that_dies_before_the_verdict_disturbs_nobody(wire: str, tmp_path: Path) -> None:
    chance = moves.chance_of("joiner dies", wire)
    with switch_job(wire, FOUR, tmp_path) as job:
        everybody_is_well(job)
        for attempt in range(12):
            kill_during_prepare(job, chance.choice((0.0, 0.001, 0.005)), ready=attempt % 3 == 0)
        assert job.move(LEAVERS, chance)
        everybody_is_well(job)


def commit_all(job: SwitchJob, *, leave: bool) -> dict[int, Rank]:
    """Ranks 2 and 3 move; the leavers, which were told of it or not."""
    generation = job.next_generation()
    spares = job.spares(LEAVERS)
    moved = job.build(generation, spares)
    stayers = job.prepare(generation, moved, 0)
    handovers = {number: job.ranks[number].call(moves.hold, generation)[1] for number in LEAVERS}
    for number in stayers:
        job.ranks[number].call(moves.commit, generation)
    leavers = {number: job.ranks.put(number, spare) for number, spare in spares.items()}
    if leave:
        for leaver in leavers.values():
            leaver.call(moves.leave, generation, 0.0)
    for number, spare in spares.items():
        spare.call(moves.go_live_and_run, generation, handovers[number], moved, [], 0.0)
    for number in set(job.others(LEAVERS)) - stayers:
        job.ranks[number].call(trainmover_ext.add_endpoints, moved, generation)
    job.endpoints.update(moved)
    job.generations.update(dict.fromkeys(moved, generation))
    return leavers


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_a_leaver_may_die_or_idle_after_the_commit(wire: str, told: bool, tmp_path: Path) -> None:
    with switch_job(wire, FOUR, tmp_path, TRAINMOVER_PEER_TIMEOUT_MS="1000") as job:
        everybody_is_well(job)
        for leaver in commit_all(job, leave=told).values():
            leaver.close()
        everybody_is_well(job)
        leavers = commit_all(job, leave=told)
        time.sleep(1.6)  # longer than anybody's silence may last
        everybody_is_well(job)
        for leaver in leavers.values():
            assert not leaver.call(moves.is_aborted)
            leaver.signal(19)  # SIGSTOP
        time.sleep(1.6)
        everybody_is_well(job)
        for leaver in leavers.values():
            leaver.close()
        everybody_is_well(job)


def works_no_more() -> str:
    with pytest.raises(SwitchError) as caught:
        all_reduce(0)
    with pytest.raises(SwitchError):
        trainmover_ext.send_note(0, 1, b"x")
    with pytest.raises(SwitchError):
        trainmover_ext.resume(1000)
    return str(caught.value)


@pytest.mark.parametrize("wire", WIRES)
def test_whoever_has_left_can_do_nothing_any_more(wire: str, tmp_path: Path) -> None:
    with switch_job(wire, FOUR, tmp_path) as job:
        everybody_is_well(job)
        leavers = commit_all(job, leave=True)
        for leaver in leavers.values():
            assert "another process's by now" in leaver.call(works_no_more)
            leaver.call(runner.leave)
        everybody_is_well(job)
        job.gone += leavers.values()


def commit_too_early(generation: int, group: int, source: int) -> None:
    """With a receive outstanding from a rank that moves: refused, and nothing is changed by that."""
    handle = runner.groups().handles[group]
    received = torch.zeros(4)
    work = handle.recv([received], source, 11)
    for _ in range(3):
        with pytest.raises(SwitchError, match="is outstanding on a link to a rank that moves"):
            trainmover_ext.commit_switch(generation)
    runner.groups().direct.send(np.zeros(1), 2, tag=12)
    work.wait()
    assert torch.equal(received, torch.ones(4))


def answer(group: int, to: int) -> None:
    runner.groups().direct.recv(np.zeros(1), 0, tag=12)
    runner.groups().handles[group].send([torch.ones(4)], to, 11).wait()


@pytest.mark.parametrize("wire", WIRES)
def test_a_commit_while_something_is_outstanding_is_refused(wire: str, tmp_path: Path) -> None:
    with switch_job(wire, FOUR, tmp_path) as job:
        chance = moves.chance_of("outstanding")
        everybody_is_well(job)
        for _ in range(10):
            generation = job.next_generation()
            spares = job.spares(LEAVERS)
            moved = job.build(generation, spares)
            job.ranks[0].call(moves.prepare, generation, moved)
            job.ranks[0].call(moves.wait_until, SwitchPhase.READY, generation)
            job.ranks[2].start(answer, 1, 0)
            job.ranks[0].call(commit_too_early, generation, 1, 1)
            job.ranks[2].result()
            job.ranks[0].call(trainmover_ext.abort_switch, generation)
            everybody_is_well(job)
            for spare in spares.values():
                spare.close()
        assert job.move(LEAVERS, chance)


@pytest.mark.parametrize("wire", WIRES)
def test_prepared_and_aborted_fifty_times(wire: str, tmp_path: Path) -> None:
    """With one joiner all the time, and traffic all the time; then it does move in."""
    with switch_job(wire, FOUR, tmp_path) as job:
        job.ranks.run(moves.run, [(range(5),)] * 4)  # all the links that there will be
        spares = job.spares(LEAVERS)
        moved = job.build(job.next_generation(), spares)
        stayers = job.linked_to(LEAVERS)
        before = {number: job.ranks[number].call(moves.held_by_links) for number in stayers}
        for attempt in range(50):
            for number in stayers:
                job.ranks[number].start(moves.prepare_and_run, job.generation, moved, [attempt % 5])
            for number in LEAVERS:
                job.ranks[number].start(moves.run, [attempt % 5])
            for rank in job.ranks:
                rank.result()
            for number in stayers:
                if attempt % 2 == 0:
                    job.ranks[number].call(moves.wait_until, SwitchPhase.READY, job.generation)
                job.ranks[number].call(trainmover_ext.abort_switch, job.generation)
            later = job.next_generation()
            for spare in spares.values():
                spare.call(trainmover_ext.join_switch, later, job.endpoints, job.generations)
        deadline = time.monotonic() + moves.LIMIT_S
        while (after := {number: job.ranks[number].call(moves.held_by_links) for number in stayers}) != before:
            assert time.monotonic() < deadline, (before, after)  # the last that were dropped are on their way
        for spare in spares.values():
            spare.close()
        everybody_is_well(job)


@pytest.mark.parametrize("wire", WIRES)
def test_an_abort_of_collectives_voids_what_is_prepared(wire: str, tmp_path: Path) -> None:
    with switch_job(wire, FOUR, tmp_path) as job:
        chance = moves.chance_of("abort", wire)
        everybody_is_well(job)
        for _ in range(5):
            generation = job.next_generation()
            spares = job.spares(LEAVERS)
            moved = job.build(generation, spares)
            stayers = job.prepare(generation, moved, 0)
            job.ranks[0].call(abort)
            for number in stayers:
                assert "aborted" in job.ranks[number].call(broken, generation)
                assert job.ranks[number].call(try_commit, generation)
            job.resume({})
            everybody_is_well(job)
            for spare in spares.values():
                spare.close()
        assert job.move(LEAVERS, chance)
        job.ranks[1].call(abort)
        for number in LEAVERS:
            assert job.ranks[number].call(try_call, all_reduce, 0).error == "CollectiveAborted"
        job.resume({})
        everybody_is_well(job)


def abort() -> None:
    trainmover_ext.abort_collectives(reason="test")


def try_commit(generation: int) -> bool:
    with pytest.raises(SwitchError, match="resume"):
        trainmover_ext.commit_switch(generation)
    return True


def reduce_until(stop: str) -> tuple[int, float]:
    """All-reduces of ranks 0 and 1 alone, until the file is there; their number, and how long the longest took."""
    rounds, longest_s = 0, 0.0
    while True:
        rounds += 1
        started_at = time.monotonic()
        tensor = torch.tensor([float(Path(stop).exists()), 1.0])
        runner.groups().handles[3].allreduce([tensor]).wait()
        assert tensor[1] == 2
        longest_s = max(longest_s, time.monotonic() - started_at)
        if tensor[0] > 0:
            return rounds, longest_s


def test_groups_that_have_nothing_to_do_with_it_never_pause(tmp_path: Path) -> None:
    """Ranks 0 and 1 reduce all the time, on their main threads, while 2 and 3 move."""
    with switch_job("tcp", FOUR, tmp_path) as job:
        job.ranks.run(all_reduce, [(3,), (3,), (4,), (4,)])
        stop = tmp_path / "stop"
        for number in (0, 1):
            job.ranks[number].start(reduce_until, str(stop))
        generation = job.next_generation()
        spares = job.spares(LEAVERS)
        moved = job.build(generation, spares)
        began_at = time.monotonic()
        for number, spare in spares.items():
            held, handover = job.ranks[number].call(moves.hold, generation)
            assert held == ((3,) if number == 2 else (2,))
            spare.start(moves.go_live_and_run, generation, handover, moved, [], 0.0)
            spare.result()
        for number, spare in spares.items():
            with closing(job.ranks.put(number, spare)) as leaver:
                leaver.call(moves.leave, generation, 0.0)
        for number in LEAVERS:
            job.ranks[number].start(all_reduce, 4, 100, 20)
        for number in LEAVERS:
            job.ranks[number].result()
        took_s = time.monotonic() - began_at
        stop.touch()
        for number in (0, 1):
            rounds, longest_s = job.ranks[number].result()
            print(f"{rounds} rounds, the longest {longest_s:.3f} s; the switch {took_s:.2f} s")
            assert rounds > 10
            assert longest_s < max(1.0, took_s / 2)
        for number in (0, 1):
            job.ranks[number].call(trainmover_ext.add_endpoints, moved, generation)
        everybody_is_well(job)
