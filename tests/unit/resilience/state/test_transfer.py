"""How memory is cut, how long a wait may last, how an address is written."""

from __future__ import annotations

import os
import socket
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.resilience.state.errors import TransferCancelled, TransferTimeout
from megatron.resilience.state.transfer import (
    POLL_S,
    Patience,
    TransferIdentity,
    TransferLimits,
    chunks_of,
    close_in_children,
    join_address,
    split_address,
    tune,
)
from megatron.resilience.state.wire import CHUNK_BYTES_MAX


@given(sizes=st.lists(st.integers(0, 40), max_size=5), chunk_bytes=st.integers(1, 50))
def test_chunks_are_all_of_the_memory_in_order_and_bounded(sizes: list[int], chunk_bytes: int) -> None:
    parts = [memoryview(bytearray([number] * size)) for number, size in enumerate(sizes)]
    chunks = chunks_of(parts, chunk_bytes)
    assert b"".join(chunks) == b"".join(parts)
    assert all(1 <= len(chunk) <= chunk_bytes for chunk in chunks)
    assert all(len(set(chunk)) == 1 for chunk in chunks), "a chunk reaches over two parts"


def test_chunks_are_the_memory_itself() -> None:
    memory = bytearray(10)
    chunks_of([memoryview(memory)], 4)[2][1] = 7
    assert memory[9] == 7


def test_too_many_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        chunks_of([memoryview(bytearray((1 << 24) + 1))], 1)


@pytest.mark.parametrize("chunk_bytes", [0, CHUNK_BYTES_MAX + 1])
def test_a_chunk_size_out_of_bounds_is_refused(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="chunk_bytes is"):
        TransferLimits(chunk_bytes=chunk_bytes)


def test_patience_ends_with_time_or_by_the_caller() -> None:
    now = [100.0]
    patience = Patience(what="wait", seconds=1.0, clock=lambda: now[0])
    assert patience.next_wait_s() == POLL_S
    now[0] = 100.98
    assert patience.next_wait_s() == pytest.approx(0.02)
    now[0] = 101.0
    with pytest.raises(TransferTimeout, match="wait: not done within 1 s"):
        patience.next_wait_s()
    with pytest.raises(TransferCancelled):
        Patience(what="wait", seconds=1.0, cancelled=lambda: True).next_wait_s()


@pytest.mark.parametrize(("host", "text"), [("10.0.0.1", "10.0.0.1:80"), ("::1", "[::1]:80")])
def test_addresses_survive_the_way_as_text(host: str, text: str) -> None:
    assert join_address(host, 80) == text
    assert split_address(text) == (host, 80)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:8x"])
def test_other_text_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        split_address(text)


def test_a_tuned_connection_notices_a_peer_that_is_cut_off() -> None:
    with socket.socket() as connection:
        tune(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
        assert not connection.getblocking()


def test_the_token_is_not_shown() -> None:
    identity = TransferIdentity(job_id="job", token="secret", generation=1, global_rank=0)
    assert "secret" not in repr(identity)


def test_sockets_are_closed_in_a_forked_child_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def register(**_callbacks: object) -> None:
        raise AssertionError("a callback for each socket is never taken back")

    monkeypatch.setattr(os, "register_at_fork", register)
    ends = [end for _ in range(3) for end in socket.socketpair()]
    for end in ends:
        close_in_children(end)
    child = os.fork()
    if child == 0:
        os._exit(sum(end.fileno() == -1 for end in ends))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(ends)
    assert all(end.fileno() >= 0 for end in ends)
    for end in ends:
        end.close()
    gone = [weakref.ref(end) for end in ends]
    del end, ends
    assert [reference() for reference in gone] == [None] * 6
