"""The leaver's side: nobody but the joiner rank gets the state, strangers hold nobody up, verdicts are kept."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from megatron.resilience.state.errors import (
    LeaverStays,
    StateError,
    TransferCancelled,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from megatron.resilience.state.state_client import StateClient
from megatron.resilience.state.state_server import StateServer
from megatron.resilience.state.transfer import TransferIdentity, Verdict, split_address
from tests.unit.resilience.state.handover import IDENTITY, LIMITS, SIZES, Elsewhere, Memory, Relay, cut_at

SHORT = dataclasses.replace(LIMITS, total_s=0.3)


@pytest.fixture
def server() -> Iterator[StateServer]:
    with StateServer(IDENTITY, limits=LIMITS) as made:
        yield made


def client_of(address: str, identity: TransferIdentity = IDENTITY) -> StateClient:
    return StateClient(identity, address, limits=LIMITS)


def take_all(address: str, into: Memory) -> Verdict:
    with client_of(address) as client:
        client.receive_state(into)
        return client.receive_verdict()


@pytest.mark.parametrize("verdict", list(Verdict))
def test_state_and_verdict_arrive(server: StateServer, verdict: Verdict) -> None:
    given, taken = Memory(filled=True), Memory(filled=False)
    address = server.listen()
    joiner = Elsewhere(lambda: take_all(address, taken))
    report = server.send_state(given)
    assert report.bytes_moved == 765 + len(given.small)
    assert server.send_verdict(verdict)
    assert joiner.result() is verdict
    assert taken == given


def test_the_small_state_is_taken_when_the_chunks_have_gone_and_only_once(server: StateServer) -> None:
    taken = Memory((32 << 20,), filled=False)  # more than sockets hold

    class Aged(Memory):
        asked = 0

        def capture(self) -> bytes:
            self.asked += 1
            return b"there" if any(taken.parts[0][:64]) else b"nothing there yet"

    given = Aged((32 << 20,), filled=True)
    address = server.listen()
    joiner = Elsewhere(lambda: take_all(address, taken))
    server.send_state(given)
    assert server.send_verdict(Verdict.LEAVE)
    joiner.result()
    assert (taken.small, given.asked) == (b"there", 1)


def test_a_state_that_cannot_be_captured_is_not_given(server: StateServer) -> None:
    class Broken(Memory):
        def capture(self) -> bytes:
            raise StateError("a save is not finished")

    address = server.listen()
    joiner = Elsewhere(lambda: take_all(address, Memory(filled=False)))
    with pytest.raises(StateError, match="a save is not finished"):
        server.send_state(Broken(filled=True))
    server.send_verdict(Verdict.STAY)
    with pytest.raises(LeaverStays):
        joiner.result()


def test_a_state_without_bytes_is_no_special_case(server: StateServer) -> None:
    given, taken = Memory((), filled=True), Memory((), filled=False)
    address = server.listen()
    joiner = Elsewhere(lambda: take_all(address, taken))
    server.send_state(given)
    assert server.send_verdict(Verdict.LEAVE)
    assert joiner.result() is Verdict.LEAVE
    assert taken.small == given.small


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"global_rank": 4}, "found a joiner of global rank 4, expected 3"),
        ({"generation": 1}, "found a joiner of generation 1, expected 2"),
        ({"job_id": "another"}, "another job"),
    ],
)
def test_another_rank_generation_or_job_is_told_and_the_right_one_served(
    server: StateServer, changed: dict[str, object], words: str
) -> None:
    given, taken = Memory(filled=True), Memory(filled=False)
    address = server.listen()
    wrong = client_of(address, dataclasses.replace(IDENTITY, **changed))  # type: ignore[arg-type]
    stranger = Elsewhere(lambda: wrong.receive_state(Memory(filled=False)))
    giver = Elsewhere(lambda: server.send_state(given))
    with pytest.raises(TransferRefused, match=words):
        stranger.result()
    with client_of(address) as client:
        client.receive_state(taken)
    giver.result()
    assert taken == given


def test_a_wrong_token_gets_no_answer_and_no_byte(server: StateServer) -> None:
    given, taken = Memory(filled=True), Memory(filled=False)
    address = server.listen()
    giver = Elsewhere(lambda: server.send_state(given))
    wrong = StateClient(dataclasses.replace(IDENTITY, token="guessed"), address, limits=SHORT)
    with pytest.raises(TransferTimeout):
        wrong.receive_state(taken)
    assert taken == Memory(filled=False)
    with client_of(address) as client:
        client.receive_state(taken)
    giver.result()
    assert taken == given


def test_another_layout_ends_the_transfer_at_once_on_both_sides(server: StateServer) -> None:
    address = server.listen()
    joiner = Elsewhere(lambda: take_all(address, Memory((700, 2, 63), filled=False)))
    with pytest.raises(TransferRefused, match="another way"):
        server.send_state(Memory(filled=True))
    with pytest.raises(TransferRefused, match="another way"):
        joiner.result()


def test_a_joiner_that_cannot_use_the_state_ends_the_transfer_with_its_reason(server: StateServer) -> None:
    address = server.listen()
    taken = Memory(filled=False)
    taken.fits = False
    joiner = Elsewhere(lambda: take_all(address, taken))
    with pytest.raises(TransferRefused, match="it does not fit"):
        server.send_state(Memory(filled=True))
    with pytest.raises(TransferRefused, match="it does not fit"):
        joiner.result()


@pytest.mark.parametrize("comes", [False, True], ids=["never there", "cut off each time"])
def test_a_state_that_gets_no_further_is_given_up_before_its_time_is_over(comes: bool) -> None:
    given, taken = Memory(filled=True), Memory(filled=False)
    with StateServer(IDENTITY, limits=dataclasses.replace(LIMITS, progress_s=0.3)) as server:
        relay = Relay(split_address(server.listen()), dict.fromkeys(range(10_000), cut_at(200)))
        with relay.running() as address:
            client = client_of(address)
            gives_up = threading.Event()
            joiner = Elsewhere(lambda: client.receive_state(taken, cancelled=gives_up.is_set)) if comes else None
            with pytest.raises(TransferTimeout, match=r"no progress for 0\.3 s, \d of 5 chunks"):
                server.send_state(given)
            gives_up.set()
            if joiner is not None:
                with pytest.raises(TransferCancelled):
                    joiner.result()
            assert (relay.seen > 1) is comes
            client.close()


def test_silent_and_noisy_strangers_hold_nobody_up(server: StateServer) -> None:
    given, taken = Memory(filled=True), Memory(filled=False)
    address = server.listen()
    strangers = [socket.create_connection(split_address(address)) for _ in range(30)]
    try:
        for number, stranger in enumerate(strangers):
            stranger.sendall([b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 50, b"\x40\x00"][number % 4])
        joiner = Elsewhere(lambda: take_all(address, taken))
        report = server.send_state(given)
        assert server.send_verdict(Verdict.LEAVE)
        assert joiner.result() is Verdict.LEAVE
    finally:
        for stranger in strangers:
            stranger.close()
    assert report.duration_s < LIMITS.handshake_s + 3
    assert taken == given


def test_silent_strangers_in_every_place_are_shown_the_door_in_time() -> None:
    given, taken = Memory(filled=True), Memory(filled=False)
    limits = dataclasses.replace(LIMITS, handshake_s=0.5)
    with StateServer(IDENTITY, limits=limits) as server:
        address = server.listen()
        strangers = [socket.create_connection(split_address(address)) for _ in range(40)]
        try:
            joiner = Elsewhere(lambda: take_all(address, taken))
            server.send_state(given)
            assert server.send_verdict(Verdict.LEAVE)
            assert joiner.result() is Verdict.LEAVE
        finally:
            for stranger in strangers:
                stranger.close()
    assert taken == given


def until(server: StateServer, is_so: Callable[[], bool], clock: list[float], step_s: float = 0.01) -> None:
    """Tends `server` as votes do until `is_so`; its clock goes on by `step_s` each time."""
    given_up_s = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < given_up_s, "it never comes to that"
        clock[0] += step_s
        server.tend()


def test_before_the_boundary_idle_strangers_are_shown_out_and_the_joiner_is_kept() -> None:
    given, taken = Memory(filled=True), Memory(filled=False)
    now_s = [0.0]
    with StateServer(IDENTITY, limits=LIMITS, clock=lambda: now_s[0]) as server:
        address = server.listen()
        strangers = [socket.create_connection(split_address(address)) for _ in range(60)]
        try:
            server.tend()
            assert len(server._greetings) == 16
            joiner = Elsewhere(lambda: take_all(address, taken))
            until(server, lambda: server._early is not None, now_s, LIMITS.handshake_s)
            strangers += [socket.create_connection(split_address(address)) for _ in range(60)]
            until(server, lambda: len(server._greetings) == 16, now_s)
            now_s[0] += 100 * LIMITS.handshake_s
            server.tend()
            assert not server._greetings
            assert server.send_state(given).connections == 1
            assert server.send_verdict(Verdict.LEAVE)
            assert joiner.result() is Verdict.LEAVE
        finally:
            for stranger in strangers:
                stranger.close()
    assert taken == given


@pytest.mark.parametrize("how", ["stays", "other layout"])
def test_a_joiner_that_presented_itself_early_is_answered_at_the_boundary(server: StateServer, how: str) -> None:
    address, now_s = server.listen(), [0.0]
    sizes = (1, 2) if how == "other layout" else SIZES
    joiner = Elsewhere(lambda: take_all(address, Memory(sizes, filled=False)))
    until(server, lambda: server._early is not None, now_s)
    if how == "stays":
        assert server.send_verdict(Verdict.STAY)
        with pytest.raises(LeaverStays):
            joiner.result()
    else:
        with pytest.raises(TransferRefused, match="another way"):
            server.send_state(Memory(filled=True))
        with pytest.raises(TransferRefused, match="another way"):
            joiner.result()


@pytest.mark.parametrize("closes", [False, True])
def test_a_joiner_that_hung_before_the_boundary_is_replaced_and_one_that_is_gone_forgotten(
    server: StateServer, closes: bool
) -> None:
    address, gives_up, now_s = server.listen(), threading.Event(), [0.0]
    client = client_of(address)
    joiner = Elsewhere(lambda: client.receive_state(Memory(filled=False), cancelled=gives_up.is_set))
    until(server, lambda: server._early is not None, now_s)
    gives_up.set()
    with pytest.raises(TransferCancelled):
        joiner.result()
    if closes:
        client.close()
        until(server, lambda: server._early is None, now_s)
    taken, hung = Memory(filled=False), server._early
    again = Elsewhere(lambda: take_all(address, taken))
    until(server, lambda: server._early not in (None, hung), now_s)
    server.send_state(Memory(filled=True))
    assert server.send_verdict(Verdict.LEAVE)
    assert again.result() is Verdict.LEAVE
    assert taken == Memory(filled=True)
    client.close()


def test_nobody_comes_is_a_time_out_that_names_the_rank() -> None:
    with StateServer(IDENTITY, limits=SHORT) as server:
        server.listen()
        with pytest.raises(TransferTimeout, match=r"send state of global rank 3, generation 2: not done within 0\.3 s"):
            server.send_state(Memory(filled=True))
        assert not server.send_verdict(Verdict.STAY, within_s=0.1)


def test_a_caller_can_stop_it(server: StateServer) -> None:
    server.listen()
    asked = threading.Event()

    def cancelled() -> bool:
        was_asked = asked.is_set()
        asked.set()
        return was_asked

    with pytest.raises(TransferCancelled):
        server.send_state(Memory(filled=True), cancelled=cancelled)


def test_leave_is_not_said_before_the_state_is_acknowledged(server: StateServer) -> None:
    server.listen()
    with pytest.raises(TransferError, match="expected STAY"):
        server.send_verdict(Verdict.LEAVE)


def test_a_verdict_is_never_changed(server: StateServer) -> None:
    address = server.listen()
    joiner = Elsewhere(lambda: take_all(address, Memory(filled=False)))
    server.send_state(Memory(filled=True))
    assert server.send_verdict(Verdict.LEAVE)
    with pytest.raises(TransferError, match="cannot become"):
        server.send_verdict(Verdict.STAY)
    assert joiner.result() is Verdict.LEAVE
    with pytest.raises(TransferError, match="make another server"):
        server.send_state(Memory(filled=True))


def test_without_a_listener_it_says_so() -> None:
    server = StateServer(IDENTITY, limits=LIMITS)
    with pytest.raises(TransferError, match="call listen"):
        server.send_state(Memory(filled=True))
    server.close()


def test_a_process_forked_meanwhile_does_not_keep_its_port_open(server: StateServer) -> None:
    address = server.listen()
    reading, writing = os.pipe()
    runs_reading, runs_writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(runs_writing, b"x")
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        assert os.read(runs_reading, 1) == b"x"
        server.close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(split_address(address))
    finally:
        for descriptor in (writing, reading, runs_reading, runs_writing):
            os.close(descriptor)
        os.waitpid(child, 0)


def test_it_can_be_closed_twice_and_lets_its_port_go(server: StateServer) -> None:
    address = server.listen()
    server.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(split_address(address))
    with StateServer(IDENTITY) as another:
        another.close()
