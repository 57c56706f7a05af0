"""Notes from rank to rank: in order, whole, bounded, and never to another process than the one they were meant for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import trainmover_ext
from tests.distributed.collectives.schedules import Layout
from tests.distributed.switch import moves
from tests.distributed.switch.switch_job import switch_job
from tests.distributed.switch.test_failures import FOUR, LEAVERS, commit_all, everybody_is_well

pytestmark = pytest.mark.distributed

WIRES = ("machines", "tcp")
THREE = Layout(size=3, groups=((0, 1, 2),))
SIZES = (0, 1, 7, 300, trainmover_ext.NOTE_BYTES_MAX)
EACH = 60


def exchange(rank: int, size: int) -> int:
    """Everybody sends to everybody, then reads what came; the bytes of it."""
    others = [other for other in range(size) if other != rank]
    for number in range(EACH):
        for other in others:
            payload = bytes([rank, number]) * (SIZES[number % len(SIZES)] // 2)
            send_when_there_is_room(other, number + 1, payload)
    seen = dict.fromkeys(others, 0)
    total = 0
    while any(count < EACH for count in seen.values()):
        note = trainmover_ext.receive_note(20)
        assert note is not None, seen
        number = seen[note.peer]
        assert note.generation == number + 1
        assert note.payload == bytes([note.peer, number]) * (SIZES[number % len(SIZES)] // 2)
        seen[note.peer] += 1
        total += len(note.payload)
    return total


def send_when_there_is_room(peer: int, generation: int, payload: bytes) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            return trainmover_ext.send_note(peer, generation, payload)
        except trainmover_ext.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.mark.parametrize("wire", WIRES)
def test_notes_arrive_whole_and_in_order_among_all_ranks(wire: str, tmp_path: Path) -> None:
    """No connection is there before: the first note makes it."""
    with switch_job(wire, THREE, tmp_path) as job:
        totals = job.ranks.run(exchange, [(rank, 3) for rank in range(3)])
        assert len(set(totals)) == 1
        assert totals[0] > EACH // len(SIZES) * trainmover_ext.NOTE_BYTES_MAX
        everybody_is_well(job)


def wrong_notes() -> None:
    with pytest.raises(ValueError, match="expected at most 65536"):
        trainmover_ext.send_note(1, 1, bytes(trainmover_ext.NOTE_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="expected another"):
        trainmover_ext.send_note(0, 1, b"")
    with pytest.raises(trainmover_ext.TransportError, match="no endpoint is known"):
        trainmover_ext.send_note(9, 1, b"")
    started_at = time.monotonic()
    assert trainmover_ext.receive_note(0.05) is None
    assert time.monotonic() - started_at >= 0.05
    assert trainmover_ext.receive_note(0) is None


def flood() -> int:
    """To a rank that is stopped; how many were taken before the first was refused."""
    for count in range(10_000):
        try:
            trainmover_ext.send_note(1, 1, bytes(trainmover_ext.NOTE_BYTES_MAX))
        except trainmover_ext.TransportError:
            with pytest.raises(trainmover_ext.TransportError, match="256 notes wait"):
                trainmover_ext.send_note(1, 1, b"")
            return count
    raise AssertionError("no bound")


def receive_all(count: int) -> None:
    for _ in range(count):
        note = trainmover_ext.receive_note(20)
        assert note is not None
        assert len(note.payload) == trainmover_ext.NOTE_BYTES_MAX


def test_notes_that_cannot_be_are_refused_and_those_that_wait_are_bounded(tmp_path: Path) -> None:
    with switch_job("tcp", THREE, tmp_path) as job:
        job.ranks[0].call(wrong_notes)
        everybody_is_well(job)
        job.ranks[1].signal(19)  # SIGSTOP
        taken = job.ranks[0].call(flood)
        assert 256 <= taken < 600  # what the kernel takes comes on top
        job.ranks[1].signal(18)  # SIGCONT
        job.ranks[1].call(receive_all, taken)
        everybody_is_well(job)


def note_of(timeout_s: float) -> tuple[int, int, bytes] | None:
    note = trainmover_ext.receive_note(timeout_s)
    return None if note is None else (note.peer, note.generation, note.payload)


@pytest.mark.parametrize("wire", WIRES)
def test_a_note_goes_to_the_process_that_holds_the_rank_and_comes_from_none_other(wire: str, tmp_path: Path) -> None:
    with switch_job(wire, FOUR, tmp_path) as job:
        everybody_is_well(job)
        leavers = commit_all(job, leave=False)
        leavers[2].call(trainmover_ext.send_note, 0, 1, b"from the old process")
        job.ranks[2].call(trainmover_ext.send_note, 0, 2, b"from the new process")
        assert job.ranks[0].call(note_of, 10) == (2, 2, b"from the new process")
        job.ranks[0].call(trainmover_ext.send_note, 2, 2, b"to the new process")
        assert job.ranks[2].call(note_of, 10) == (0, 2, b"to the new process")
        assert job.ranks[0].call(note_of, 0.5) is None
        assert leavers[2].call(note_of, 0.1) is None
        job.gone += leavers.values()
        everybody_is_well(job)


@pytest.mark.parametrize("wire", WIRES)
def test_what_a_leaver_says_before_it_leaves_arrives(wire: str, tmp_path: Path) -> None:
    with switch_job(wire, FOUR, tmp_path) as job:
        everybody_is_well(job)
        generation = job.next_generation()
        job.ranks[2].call(moves.hold, generation)
        for number in range(40):
            job.ranks[2].call(trainmover_ext.send_note, 0, generation, bytes([number]) * 20_000)
        job.ranks[2].call(moves.leave, generation, 0.0)
        job.ranks[2].kill()
        for number in range(40):
            assert job.ranks[0].call(note_of, 10) == (2, generation, bytes([number]) * 20_000)
        assert LEAVERS[0] == 2
        assert not job.ranks[0].call(moves.is_aborted)
