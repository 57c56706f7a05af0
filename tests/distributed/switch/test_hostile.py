"""Whoever dials a slot that is being prepared, or poses as the joiner, and is not who it should be: turned away."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

import trainmover_ext
from tests.distributed.collectives.intruder import (
    Hello,
    Purpose,
    Target,
    Verdict,
    challenge_of,
    communicator_id,
    read_message,
    verdict_of,
)
from tests.distributed.collectives.jobs import TOKEN
from tests.distributed.switch import moves
from tests.distributed.switch.switch_job import switch_job
from tests.distributed.switch.test_failures import FOUR, LEAVERS, broken, everybody_is_well

pytestmark = pytest.mark.distributed


def name_of_world() -> str:
    return next(stats["name"] for stats in trainmover_ext.communicator_stats() if "direct" in stats["name"])


def test_only_the_right_callers_get_into_a_slot_that_is_prepared(tmp_path: Path) -> None:
    with switch_job("tcp", FOUR, tmp_path) as job:
        everybody_is_well(job)
        generation = job.next_generation() + 5
        job.generation = generation
        spares = job.spares(LEAVERS)
        moved = job.build(generation, spares)
        target = Target.of(moved[2])
        caller = json.loads(job.endpoints[0])
        honest = Hello(
            token=TOKEN,
            to_incarnation=target.incarnation,
            from_incarnation=caller["incarnation"],
            from_rank=0,
            to_rank=2,
            generation=generation,
            communicator=communicator_id(job.ranks[0].call(name_of_world)),
        )
        lies: dict[str, tuple[dict[str, object], Verdict | None]] = {
            "a guessed token": ({"token": "guess"}, None),
            "the generation before": ({"generation": generation - 1}, Verdict.STALE_GENERATION),
            "the first generation": ({"generation": 1}, Verdict.STALE_GENERATION),
            "another process": ({"from_incarnation": 5}, Verdict.WRONG_INCARNATION),
            "another rank called": ({"to_rank": 3}, Verdict.WRONG_RANK),
            "the process before": ({"to_incarnation": 7}, Verdict.WRONG_INCARNATION),
            "another job": ({"job": "other"}, Verdict.WRONG_JOB),
        }
        for purpose in (Purpose.CONTROL, Purpose.LINK):
            for name, (changes, verdict) in lies.items():
                with target.connect(local=False) as connection:
                    found = verdict_of(connection, honest.but(purpose=purpose, **changes))
                    assert found is verdict, (name, purpose)
        # Who is ahead waits at the door, until it gives up.
        with target.connect(local=False) as connection:
            connection.sendall(honest.but(generation=generation + 1).signed(challenge_of(connection)))
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                read_message(connection)
        # The slot is as good as before: this switch of this joiner goes through.
        stayers = job.prepare(generation, moved, 1)
        handovers = {number: job.ranks[number].call(moves.hold, generation)[1] for number in LEAVERS}
        job.switch(generation, moved, stayers, handovers, spares, moves.chance_of("hostile"))
        everybody_is_well(job)


def pose(listener: socket.socket, said: bytes) -> None:
    """Takes calls and says something of its own, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(1)
            try:
                connection.sendall(said)
                connection.recv(1024)
            except OSError:
                continue


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x17\x00\x00\x00\x01TMOV\x01\x00" + bytes(16)]
)
def test_who_only_poses_as_the_joiner_is_never_ready(said: bytes, tmp_path: Path) -> None:
    """Nothing at all, another protocol, or a challenge whose welcome it could not sign."""
    with switch_job("tcp", FOUR, tmp_path, TRAINMOVER_CONNECT_TIMEOUT_MS="1500") as job, socket.socket() as listener:
        everybody_is_well(job)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        posing = threading.Thread(target=pose, args=(listener, said), daemon=True)
        posing.start()
        generation = job.next_generation()
        fields = json.loads(job.endpoints[2])
        fields.update(incarnation=99, address=f"127.0.0.1:{listener.getsockname()[1]}")
        job.ranks[0].call(moves.prepare, generation, {2: json.dumps(fields)})
        assert "no connection within 1500 ms" in job.ranks[0].call(broken, generation)
        job.ranks[0].call(trainmover_ext.abort_switch, generation)
        everybody_is_well(job)
        listener.shutdown(socket.SHUT_RDWR)
        posing.join(5)
        assert not posing.is_alive()
