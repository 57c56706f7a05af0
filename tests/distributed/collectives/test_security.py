"""Whoever can reach a rank's listeners but is not of the job, or lies, disturbs nothing and learns nothing."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import trainmover_ext
from tests.distributed.collectives import runner
from tests.distributed.collectives.intruder import (
    LIMIT_S,
    Hello,
    Purpose,
    Target,
    Verdict,
    challenge_of,
    communicator_id,
    is_closed,
    read_message,
    verdict_of,
)
from tests.distributed.collectives.jobs import TOKEN, job
from tests.distributed.collectives.ranks import Ranks

pytestmark = pytest.mark.distributed

SIZE = 2
SILENT = 300
"""More than the 256 connections that a rank keeps open before they have proved who they are."""
WAYS = ("tcp", "unix")
ODD_LENGTHS = (0, 1, 4, 119, 1025, 2**31, 2**32 - 1)
OTHER_GENERATION = 7


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A job that runs while it is attacked at rank 0."""

    ranks: Ranks
    target: Target
    honest: Hello
    """As rank 1 itself would say it."""
    local: bool
    communicator: int

    def connect(self) -> socket.socket:
        return self.target.connect(local=self.local)

    def verdict(self, hello: Hello) -> Verdict | None:
        with self.connect() as connection:
            verdict = verdict_of(connection, hello)
            assert is_closed(connection)
            return verdict

    def warnings(self) -> str:
        return self.ranks[0].text()

    def expect_warning(self, attack: Callable[[], object], warning: str) -> None:
        """Attacks until rank 0 tells of it: it tells of a few connections a second only."""
        before = len(self.warnings())
        deadline = time.monotonic() + 10
        while True:
            attack()
            if warning in self.warnings()[before:]:
                return
            assert time.monotonic() < deadline, f"expected {warning!r}, found {self.warnings()[before:]}"
            time.sleep(0.2)


# What ranks run.


def run_for(generation: int, stop: str) -> int:
    """Schedules until the file `stop` is there; the operations checked."""
    if generation != trainmover_ext.generation():
        trainmover_ext.resume(generation)
    checked, seed = 0, 0
    running = True
    while running:
        seed += 1
        checked += runner.Runner(seed).run(10)
        verdict = torch.tensor([int(Path(stop).exists())])
        dist.all_reduce(verdict)
        running = int(verdict.item()) == 0
    return checked


def open_descriptors() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}").split(":")[0].split(" ")[0])
        except FileNotFoundError:  # the listing's own
            continue
    return sorted(found)


def name_of_world() -> str:
    return next(stats["name"] for stats in trainmover_ext.communicator_stats() if "direct" in stats["name"])


@pytest.fixture(scope="module", params=WAYS)
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, str]]:
    wire = "tcp" if request.param == "tcp" else "shm"
    with job(wire, SIZE, tmp_path_factory.mktemp("job"), TRAINMOVER_TOKEN=TOKEN) as ranks:
        ranks.run(runner.run_schedules, [(1, 2)] * SIZE)
        for rank in ranks:
            rank.call(trainmover_ext.resume, OTHER_GENERATION)
        ranks.run(runner.run_schedules, [(1, 2)] * SIZE)
        yield ranks, request.param


@pytest.fixture
def scene(attacked: tuple[Ranks, str], tmp_path: Path) -> Iterator[Scene]:
    """The job runs until the test ends, then must have had right results and hold what it held before."""
    ranks, way = attacked
    endpoints = [json.loads(ranks[number].call(trainmover_ext.endpoint)) for number in range(SIZE)]
    communicator = communicator_id(ranks[0].call(name_of_world))
    before = ranks[0].call(open_descriptors)
    stop = tmp_path / "stop"
    for rank in ranks:
        rank.start(run_for, OTHER_GENERATION, str(stop))
    honest = Hello(
        token=TOKEN,
        to_incarnation=endpoints[0]["incarnation"],
        from_incarnation=endpoints[1]["incarnation"],
        generation=OTHER_GENERATION,
    )
    target = Target.of(json.dumps(endpoints[0]))
    yield Scene(ranks=ranks, target=target, honest=honest, local=way == "unix", communicator=communicator)
    stop.touch()
    checked = [rank.result() for rank in ranks]
    assert min(checked) > 0
    deadline = time.monotonic() + 10
    while (after := ranks[0].call(open_descriptors)) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert after == before


def test_random_bytes(scene: Scene) -> None:
    def attack() -> None:
        for number in range(20):
            with scene.connect() as connection:
                challenge_of(connection)
                connection.sendall(os.urandom(1 + 97 * number))
                with suppress(OSError):  # closed already
                    connection.shutdown(socket.SHUT_WR)
                assert is_closed(connection)

    scene.expect_warning(attack, "dropped a connection: handshake: found a message of type")


@pytest.mark.parametrize("length", ODD_LENGTHS)
def test_lengths_that_no_message_has(scene: Scene, length: int) -> None:
    def attack() -> None:
        with scene.connect() as connection:
            connection.sendall(scene.honest.but(length=length).signed(challenge_of(connection)))
            assert read_message(connection) == b""

    scene.expect_warning(attack, f"found a HELLO of {length + 4} bytes")


def test_callers_who_say_nothing_are_hung_up_on_and_keep_nobody_out(scene: Scene) -> None:
    """More than a rank keeps at a time; then those who do speak are heard."""
    with ExitStack() as opened:
        silent = [opened.enter_context(scene.connect()) for _ in range(SILENT)]
        started_at = time.monotonic()

        def once_more() -> None:
            with scene.connect() as connection:
                is_closed(connection)

        scene.expect_warning(once_more, "too many that have not proved who they are")
        assert all(is_closed(connection) for connection in silent)
        assert time.monotonic() - started_at < 8
    assert scene.verdict(scene.honest) is Verdict.DUPLICATE


def test_half_a_hello(scene: Scene) -> None:
    with scene.connect() as connection:
        connection.sendall(scene.honest.signed(challenge_of(connection))[:60])
        assert is_closed(connection)


def test_a_wrong_token_is_answered_with_nothing(scene: Scene) -> None:
    def attack() -> None:
        assert scene.verdict(scene.honest.but(token="guess")) is None

    scene.expect_warning(attack, "not signed with this job's token")
    assert TOKEN not in scene.warnings()


def test_another_version(scene: Scene) -> None:
    def attack() -> None:
        assert scene.verdict(scene.honest.but(version=2)) is None

    scene.expect_warning(attack, "found protocol version 2, expected 1")


LIES: dict[str, tuple[dict[str, object], Verdict | None, str]] = {
    "another job": ({"job": "other"}, Verdict.WRONG_JOB, "wrong job"),
    "another rank called": ({"to_rank": 1}, Verdict.WRONG_RANK, "wrong rank"),
    "another process called": ({"to_incarnation": 5}, Verdict.WRONG_INCARNATION, "that process is gone"),
    "another process calls": ({"from_incarnation": 5}, Verdict.WRONG_INCARNATION, "the caller is not the process"),
    "an old generation": (
        {"purpose": Purpose.LINK, "generation": OTHER_GENERATION - 1}, Verdict.STALE_GENERATION, "stale generation",
    ),
    "a control channel of an old generation": (
        {"generation": OTHER_GENERATION - 1}, Verdict.STALE_GENERATION, "stale generation",
    ),
    "no purpose": ({"purpose": 9}, None, "found purpose 9"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_caller_with_the_token_that_is_not_who_it_says(scene: Scene, lie: str) -> None:
    changes, verdict, warning = LIES[lie]

    def attack() -> None:
        assert scene.verdict(scene.honest.but(communicator=scene.communicator, **changes)) is verdict

    scene.expect_warning(attack, warning)


@pytest.mark.parametrize("purpose", [Purpose.CONTROL, Purpose.LINK])
def test_a_second_connection_for_what_there_is(scene: Scene, purpose: Purpose) -> None:
    if scene.local and purpose is Purpose.LINK:
        pytest.skip("this group shares a segment, and may have no such link")
    hello = scene.honest.but(purpose=purpose, communicator=scene.communicator if purpose is Purpose.LINK else 0)
    for _ in range(20):
        assert scene.verdict(hello) is Verdict.DUPLICATE


def test_a_recorded_hello_is_worth_nothing_later(scene: Scene) -> None:
    with scene.connect() as connection:
        recorded = scene.honest.signed(challenge_of(connection))
        connection.sendall(recorded)
        assert read_message(connection)
    with scene.connect() as connection:
        challenge_of(connection)
        connection.sendall(recorded)
        assert read_message(connection) == b""


def test_a_communicator_that_is_not_there_waits_for_it_and_no_longer_than_its_caller(scene: Scene) -> None:
    with scene.connect() as connection:
        hello = scene.honest.but(purpose=Purpose.LINK, communicator=12345)
        connection.sendall(hello.signed(challenge_of(connection)))
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            read_message(connection)
        connection.settimeout(LIMIT_S)
        connection.sendall(b"x")  # it speaks out of turn
        assert is_closed(connection)


def test_descriptors_nobody_asked_for(scene: Scene) -> None:
    if not scene.local:
        pytest.skip("only a unix socket passes descriptors")
    for hello in (scene.honest, scene.honest.but(token="guess")):
        with scene.connect() as connection, open("/dev/null", "rb") as odd:
            message = hello.signed(challenge_of(connection))
            passed = array.array("i", [odd.fileno()] * 200)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)]
            with suppress(OSError):  # it may hang up at once
                connection.sendmsg([message[:50]], ancillary)
                connection.sendmsg([message[50:]], ancillary)
            assert is_closed(connection)


def test_frames_of_the_data_plane_before_any_handshake(scene: Scene) -> None:
    for kind in range(1, 12):
        with scene.connect() as connection:
            connection.sendall(b"TMOV" + struct.pack("<BBHIQQ", kind, 0, 0, OTHER_GENERATION, 0, 1 << 50))
            assert is_closed(connection)
