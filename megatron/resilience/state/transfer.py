"""What both ends of a state transfer share: who they are, limits, verdict, how memory is cut. See state_server.py.

Paper section 5: at the boundary the leaver's ranks hand their state to the joiner's, each to its own, in parallel.
"""

from __future__ import annotations

import enum
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron.resilience.state.errors import TransferCancelled, TransferTimeout
from megatron.resilience.state.wire import CHUNK_BYTES_MAX, CHUNKS_MAX

Cancelled = Callable[[], bool]
"""Asked at least every `POLL_S` while a call waits; the place to drive other work too. True ends the call."""

POLL_S = 0.05


def never() -> bool:
    """The default of `cancelled`."""
    return False


class Verdict(enum.Enum):
    """What the leaver decided once its state was acknowledged, or could not be."""

    LEAVE = "leave"
    STAY = "stay"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferIdentity:
    """Which transfer it is; both sides must have the same."""

    job_id: str
    token: str = field(repr=False)
    generation: int
    global_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """Bounds of every wait, in seconds, and the size of what is checked at once."""

    total_s: float = 300.0
    """For one call that sends or receives state, or waits for a verdict."""
    stall_s: float = 10.0
    """Without a byte while bytes are due: the connection is given up and another one awaited."""
    progress_s: float = 60.0
    """Without a further piece of the state on its way, over however many connections: the transfer is given up."""
    handshake_s: float = 5.0
    """For a stranger to present itself, and for the rest of a message that has begun."""
    reconnect_s: float = 10.0
    """For the joiner to reach the leaver (again)."""
    chunk_bytes: int = 1 << 19

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}, expected 1 to {CHUNK_BYTES_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What a transfer took. Bytes are those of the arenas and the small state, sent again ones included."""

    bytes_moved: int
    duration_s: float
    connections: int


class Transferable(Protocol):
    """What is sent and received: `inventory.Inventory`."""

    def layout_digest(self) -> bytes:
        """32 bytes that are equal where `memory` has the same meaning."""

    def memory(self) -> list[memoryview]:
        """Bytes to be sent from, or received into, where they lie."""

    def capture(self) -> bytes:
        """The small state."""

    def restore(self, payload: bytes) -> None:
        """Takes it over. Raises StateError for what does not fit."""


@dataclass(slots=True, kw_only=True)
class Patience:
    """A wait with an end: raises when its time is over or its caller asks to stop."""

    what: str
    seconds: float
    cancelled: Cancelled = never
    clock: Callable[[], float] = time.monotonic
    _started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_s = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Since it was made."""
        return self.clock() - self._started_s

    def next_wait_s(self) -> float:
        """How long to wait before asking again. Raises TransferTimeout or TransferCancelled."""
        if self.cancelled():
            raise TransferCancelled(f"{self.what}: cancelled after {self.elapsed_s:.1f} s")
        left = self.seconds - self.elapsed_s
        if left <= 0:
            raise TransferTimeout(f"{self.what}: not done within {self.seconds:g} s; is the other side alive?")
        return min(POLL_S, left)


def chunks_of(memory: Sequence[memoryview], chunk_bytes: int) -> list[memoryview]:
    """`memory` in pieces of at most `chunk_bytes`, none of which reaches over two of its parts."""
    if sum(-(-len(part) // chunk_bytes) for part in memory) > CHUNKS_MAX:
        raise ValueError(f"chunks of {chunk_bytes} bytes are too many, expected at most {CHUNKS_MAX}; make them bigger")
    return [part[start : start + chunk_bytes] for part in memory for start in range(0, len(part), chunk_bytes)]


def tune(connection: socket.socket) -> None:
    """No waiting for more to send; a peer that is cut off is noticed within seconds instead of hours."""
    close_in_children(connection)
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)


def close_in_children(connection: socket.socket) -> None:
    """A process that is forked later (a loader of data, a saver) must not hold on to it: its end would go unnoticed."""
    _NOT_FOR_CHILDREN.add(connection)


_NOT_FOR_CHILDREN: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for connection in list(_NOT_FOR_CHILDREN):
        connection.close()


os.register_at_fork(after_in_child=_close_all_in_child)


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets round an address that has colons of its own."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The parts of `join_address`. Raises ValueError for other text."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"found address {address!r}, expected host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
