"""Ranks without a link to a machine that moves: they send and receive nothing for it, and find it when they need it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

import trainmover_ext
from tests.distributed.collectives import runner
from tests.distributed.collectives.calls import all_reduce, try_call
from tests.distributed.collectives.ranks import Rank
from tests.distributed.collectives.schedules import Layout
from tests.distributed.switch import moves
from tests.distributed.switch.switch_job import SwitchJob, switch_job
from trainmover_ext import SwitchPhase

pytestmark = pytest.mark.distributed

CHAIN = Layout(size=4, groups=((0, 1, 2, 3), (0, 1), (1, 2), (2, 3), (0, 3)))
MOVES = (3,)


def figures() -> dict[str, int]:
    """All that this rank has sent and received, to anybody, heartbeats aside."""
    stats = trainmover_ext.communicator_stats()
    return {
        **{name: value for name, value in trainmover_ext.control_stats().items() if name != "refused"},
        "bytes": sum(one["bytes_sent"] + one["bytes_received"] for one in stats),
        "links": sum(one["links"] for one in stats),
    }


def name_of_group(group: int) -> str:
    """In the figures: groups are made in the order of the layout."""
    names = [stats["name"] for stats in trainmover_ext.communicator_stats() if "direct" not in stats["name"]]
    mine = [number for number, members in enumerate(CHAIN.groups) if runner.groups().rank in members]
    return names[mine.index(group)]


def link_chain(job: SwitchJob) -> None:
    for group, members in enumerate(CHAIN.groups[1:4], start=1):
        for member in members:
            job.ranks[member].start(all_reduce, group)
        for member in members:
            job.ranks[member].result()


def move_three(job: SwitchJob) -> Rank:
    """Rank 3 moves; only rank 2 is linked to it. Returns the leaver."""
    generation = job.next_generation()
    spares = job.spares(MOVES)
    moved = job.build(generation, spares)
    assert job.linked_to(MOVES) == {2}
    job.ranks[2].call(moves.prepare, generation, moved)
    job.ranks[2].call(moves.wait_until, SwitchPhase.READY, generation)
    held, handover = job.ranks[3].call(moves.hold, generation)
    assert held == (2,)
    committed: moves.Committed = job.ranks[2].call(moves.commit, generation)
    assert (committed.tally.links.kept, committed.tally.links.replaced, committed.tally.links.dropped) == (1, 1, 0)
    replaced = [name for name, tally in committed.tally.communicators.items() if tally.replaced]
    assert replaced == [job.ranks[2].call(name_of_group, 3)]
    leaver = job.ranks.put(3, spares[3])
    leaver.call(moves.leave, generation, 0.0)
    spares[3].call(moves.go_live_and_run, generation, handover, {}, [], 0.0)
    job.gone.append(leaver)
    job.endpoints.update(moved)
    job.generations[3] = generation
    return leaver


def test_stayers_without_a_link_to_it_send_and_receive_nothing(tmp_path: Path) -> None:
    with switch_job("tcp", CHAIN, tmp_path) as job:
        link_chain(job)
        for _ in range(10):
            before = [job.ranks[number].call(figures) for number in range(3)]
            move_three(job)
            after = [job.ranks[number].call(figures) for number in range(3)]
            assert after[:2] == before[:2]
            assert after[2]["connections_made"] == before[2]["connections_made"] + 2  # a control channel and a link
            assert after[2]["links"] == before[2]["links"]
        link_chain(job)
        # No news has come to ranks 0 and 1, but none was needed.
        assert [job.ranks[number].call(figures)["links"] for number in range(3)] == [1, 2, 2]


def hear_later(endpoints: dict[int, str], generation: int, after_s: float) -> float:
    """An operation with rank 3, of which this rank is told where it is only while it waits; seconds it took."""
    timer = threading.Timer(after_s, trainmover_ext.add_endpoints, (endpoints, generation))
    started_at = time.monotonic()
    timer.start()
    tensor = torch.ones(100)
    runner.groups().handles[4].allreduce([tensor]).wait()
    assert torch.equal(tensor, torch.full((100,), 2.0))
    timer.join()
    return time.monotonic() - started_at


@pytest.mark.parametrize("leaver_is", ["idle", "gone"])
@pytest.mark.parametrize("caller", ["old", "new", "both"])
def test_a_rank_that_has_not_heard_finds_the_new_process_when_it_is_told(
    leaver_is: str, caller: str, tmp_path: Path
) -> None:
    """The far rank calls the old process, the new process calls the far rank, or both do."""
    with switch_job("tcp", CHAIN, tmp_path) as job:
        link_chain(job)
        leaver = move_three(job)
        if leaver_is == "gone":
            leaver.kill()
        told = {3: job.endpoints[3]}
        if caller != "new":
            job.ranks[0].start(hear_later, told, job.generation, 0.3)
        if caller == "old":
            time.sleep(0.2)
        job.ranks[3].start(all_reduce, 4)
        if caller == "new":
            time.sleep(0.3)
            job.ranks[0].start(hear_later, told, job.generation, 0.0)
        took = job.ranks[0].result()
        job.ranks[3].result()
        print(f"{caller}, {leaver_is}: {took:.2f} s")
        assert took < 5
        job.ranks[1].call(trainmover_ext.add_endpoints, told, job.generation)
        job.ranks.run(moves.run, [(job.seeds(1),)] * 4)


def test_a_rank_that_is_never_told_gives_up_in_the_end(tmp_path: Path) -> None:
    with switch_job("tcp", CHAIN, tmp_path, TRAINMOVER_CONNECT_TIMEOUT_MS="1500") as job:
        link_chain(job)
        leaver = move_three(job)
        started_at = time.monotonic()
        outcome = job.ranks[0].call(try_call, all_reduce, 4)
        assert outcome.error == "PeerLost"
        assert outcome.culprit == 3
        assert "no connection within 1500 ms" in outcome.message
        assert time.monotonic() - started_at > 1.4
        assert not leaver.call(moves.is_aborted)


def test_a_rank_that_nobody_holds_any_more_is_lost_after_a_moment(tmp_path: Path) -> None:
    with switch_job("tcp", CHAIN, tmp_path) as job:
        link_chain(job)
        move_three(job).kill()
        started_at = time.monotonic()
        outcome = job.ranks[0].call(try_call, all_reduce, 4)
        assert outcome.error == "PeerLost"
        assert "nobody listens where it did" in outcome.message
        assert 0.7 < time.monotonic() - started_at < 6
