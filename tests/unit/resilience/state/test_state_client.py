"""The joiner's side: connections may break or lie at any byte, and what arrives is right or refused."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.resilience.state.errors import LeaverStays, TransferCancelled, TransferError, TransferTimeout
from megatron.resilience.state.state_client import StateClient
from megatron.resilience.state.state_server import StateServer
from megatron.resilience.state.transfer import Verdict, join_address, split_address
from megatron.resilience.state.wire import MessageType, Signer, challenge, encode
from tests.unit.resilience.state.handover import IDENTITY, LIMITS, Elsewhere, Memory, Relay, cut_at, flip_at

STREAM_BYTES = 1040
"""More than a leaver sends for the memory of these tests, verdict included."""

SIGNER = Signer(token=IDENTITY.token, challenge_nonce=bytes(16), hello_nonce=bytes(16))
Harm = Callable[[int], Callable[[int, bytes], bytes]]


def hand_over(harm: dict[int, Callable[[int, bytes], bytes]]) -> tuple[Memory, Verdict, Relay]:
    """A whole transfer through a relay; gives what arrived."""
    taken = Memory(filled=False)
    with StateServer(IDENTITY, limits=LIMITS) as server:
        relay = Relay(split_address(server.listen()), harm)
        with relay.running() as address, StateClient(IDENTITY, address, limits=LIMITS) as client:

            def take() -> Verdict:
                client.receive_state(taken)
                return client.receive_verdict()

            joiner = Elsewhere(take)
            server.send_state(Memory(filled=True))
            server.send_verdict(Verdict.LEAVE)
            verdict: Verdict = joiner.result()
    return taken, verdict, relay


def test_the_stream_is_as_long_as_the_tests_below_think() -> None:
    taken, _, relay = hand_over({0: lambda _, data: data})
    assert taken == Memory(filled=True)
    assert 0.9 * STREAM_BYTES < relay.passed[0] <= STREAM_BYTES


@pytest.mark.parametrize("harm", [cut_at, flip_at])
def test_a_connection_cut_or_damaged_anywhere_is_made_good(harm: Harm) -> None:
    for place in range(0, STREAM_BYTES, 61):
        taken, verdict, relay = hand_over({0: harm(place)})
        assert taken == Memory(filled=True), place
        assert verdict is Verdict.LEAVE, place
        assert relay.seen >= 1


@pytest.mark.nightly
@pytest.mark.parametrize("harm", [cut_at, flip_at])
def test_a_connection_cut_or_damaged_at_any_byte_at_all_is_made_good(harm: Harm) -> None:
    for place in range(STREAM_BYTES):
        taken, verdict, _ = hand_over({0: harm(place)})
        assert (taken == Memory(filled=True), verdict) == (True, Verdict.LEAVE), place


def test_a_verdict_whose_length_was_damaged_is_not_waited_for_to_the_end() -> None:
    _, _, relay = hand_over({0: lambda _, data: data})
    verdict_bytes = len(SIGNER.seal(MessageType.VERDICT, encode("leave")))
    taken, verdict, relay = hand_over({0: flip_at(relay.passed[0] - verdict_bytes)})
    assert (taken == Memory(filled=True), verdict, relay.seen) == (True, Verdict.LEAVE, 2)


def test_a_second_cut_goes_on_after_the_last_whole_chunk() -> None:
    taken, _, relay = hand_over({0: cut_at(600), 1: cut_at(450), 2: lambda _, data: data})
    assert taken == Memory(filled=True)
    assert relay.seen == 3
    assert relay.passed[2] < 900, "what was there already came again"


def test_a_verdict_that_was_lost_is_said_again() -> None:
    taken = Memory(filled=False)
    with StateServer(IDENTITY, limits=LIMITS) as server:
        address = server.listen()
        with StateClient(IDENTITY, address, limits=LIMITS) as client:
            giver = Elsewhere(lambda: server.send_state(Memory(filled=True)))
            client.receive_state(taken)
            giver.result()
            client.close()  # as when its link is cut, before the verdict
            teller = Elsewhere(lambda: server.send_verdict(Verdict.LEAVE))
            assert client.receive_verdict() is Verdict.LEAVE
            assert teller.result()
    assert taken == Memory(filled=True)


def test_stay_instead_of_state_is_heard_as_such() -> None:
    with (
        StateServer(IDENTITY, limits=LIMITS) as server,
        StateClient(IDENTITY, server.listen(), limits=LIMITS) as client,
    ):
        joiner = Elsewhere(lambda: client.receive_state(Memory(filled=False)))
        assert server.send_verdict(Verdict.STAY)
        with pytest.raises(LeaverStays):
            joiner.result()
        assert client.receive_verdict() is Verdict.STAY


def test_it_may_connect_long_before_the_boundary() -> None:
    with (
        StateServer(IDENTITY, limits=LIMITS) as server,
        StateClient(IDENTITY, server.listen(), limits=LIMITS) as client,
    ):
        client.connect()
        taken = Memory(filled=False)
        joiner = Elsewhere(lambda: client.receive_state(taken))
        assert server.send_state(Memory(filled=True)).connections == 1
        joiner.result()
    assert taken == Memory(filled=True)


def test_a_leaver_that_is_gone_is_an_error_that_names_it() -> None:
    with StateServer(IDENTITY) as server:
        address = server.listen()
    limits = dataclasses.replace(LIMITS, reconnect_s=0.2)
    with pytest.raises(TransferError, match=rf"the leaver rank at .*{address.split(':')[1]}.* cannot be reached"):
        StateClient(IDENTITY, address, limits=limits).receive_state(Memory(filled=False))


def test_a_caller_can_stop_it() -> None:
    asked = threading.Event()
    with StateServer(IDENTITY) as server, StateClient(IDENTITY, server.listen(), limits=LIMITS) as client:
        joiner = Elsewhere(lambda: client.receive_state(Memory(filled=False), cancelled=asked.is_set))
        asked.set()
        with pytest.raises(TransferCancelled):
            joiner.result()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(noise=st.binary(max_size=400), as_leaver=st.booleans())
def test_a_leaver_that_speaks_nonsense_changes_nothing_and_is_given_up(noise: bytes, as_leaver: bool) -> None:
    taken = Memory(filled=False)
    limits = dataclasses.replace(LIMITS, total_s=0.15)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.02)
        stop = threading.Event()

        def speak() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall((challenge(bytes(16)) if as_leaver else b"") + noise)

        liar = Elsewhere(speak)
        address = join_address("127.0.0.1", listener.getsockname()[1])
        try:
            with pytest.raises(TransferTimeout):
                StateClient(IDENTITY, address, limits=limits).receive_state(taken)
        finally:
            stop.set()
            liar.result()
    assert taken == Memory(filled=False)


PEAK = """
import os, sys
from megatron.resilience.state.state_client import StateClient
from megatron.resilience.state.state_server import StateServer
from megatron.resilience.state.transfer import Verdict
from tests.unit.resilience.state.handover import IDENTITY, Memory

def value(name):
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name + ":")))

def grown_kb(memory, action):
    for part in memory.memory():
        part[::4096] = part[::4096]  # all pages are there before
    open("/proc/self/clear_refs", "w").write("5")
    before = value("VmRSS")
    action()
    return value("VmHWM") - before

def told(kilobytes):
    os.write(1, f"{kilobytes}\\n".encode())  # in one piece: two processes write

SIZE = 96 << 20
server = StateServer(IDENTITY)
address = server.listen()
pid = os.fork()
if pid == 0:
    memory, client = Memory((SIZE,), filled=False), StateClient(IDENTITY, address)
    told(grown_kb(memory, lambda: (client.receive_state(memory), client.receive_verdict())))
    os._exit(0)
memory = Memory((SIZE,), filled=True)
told(grown_kb(memory, lambda: (server.send_state(memory), server.send_verdict(Verdict.STAY))))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_neither_side_takes_memory_of_the_size_of_the_state() -> None:
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", PEAK],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown_kb = [int(line) for line in done.stdout.split()]
    assert len(grown_kb) == 2
    assert max(grown_kb) < 12 * 1024, f"{grown_kb} kB for a state of 96 MiB"
