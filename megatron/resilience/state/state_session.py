"""One connection of a leaver rank, from the stranger's first byte to the joiner's last. Called by `state_server.py`.

`Greeting` is a connection that has not presented itself; `Session` one that has, and gets the state. Neither waits:
the server asks them to go on when their socket can.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.resilience.state.checksum import checksum
from megatron.resilience.state.errors import WireError
from megatron.resilience.state.wire import (
    Ack,
    Failed,
    Hello,
    MessageReader,
    MessageType,
    Signer,
    chunk_header,
    decode,
    encode,
    hello_nonce,
)

_READ_BYTES_MAX = 1 << 16
_BYTES_A_TURN = 8 << 20
"""After so many the server looks at its other sockets again."""


class ConnectionLostError(Exception):
    """The other side closed the connection, or the network did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """What is sent: the leaver's memory in chunks, its small state, and the checksums as far as they are known."""

    layout: bytes
    chunks: Sequence[memoryview] = ()
    chunk_bytes: int = 0
    capture: Callable[[], bytes] = bytes
    """Gives the small state. Called once, when all chunks have gone: the ages in it are young when they arrive."""
    checksums: list[int] = field(default_factory=list)
    _small: list[bytes] = field(default_factory=list)

    @property
    def small(self) -> bytes:
        """What `capture` gave when it was first asked for."""
        if not self._small:
            self._small.append(self.capture())
        return self._small[0]

    @property
    def total_bytes(self) -> int:
        """Of all chunks."""
        return sum(len(chunk) for chunk in self.chunks)

    def checksum_of(self, index: int) -> int:
        """Of chunk `index`; chunks are summed once, in order."""
        while len(self.checksums) <= index:
            self.checksums.append(checksum(self.chunks[len(self.checksums)]))
        return self.checksums[index]


@dataclass(slots=True, kw_only=True)
class Greeting:
    """A connection from which a HELLO is awaited."""

    connection: socket.socket
    signer: Signer
    opened_s: float
    _reader: MessageReader = field(default_factory=lambda: MessageReader(frozenset({MessageType.HELLO})))

    def go_on(self) -> Hello | None:
        """Reads what there is. Raises WireError for what is no HELLO of this job, ConnectionLostError at the end."""
        message = read_message(self.connection, self._reader)
        if message is None:
            return None
        self.signer.hello_nonce = hello_nonce(message[1])
        return decode(self.signer.open(MessageType.HELLO, message[1]), Hello)


@dataclass(slots=True, kw_only=True)
class Session:
    """The connection of the joiner rank. `moved_s` is when it last took or gave a byte."""

    connection: socket.socket
    signer: Signer
    cargo: Cargo
    next_chunk: int
    moved_s: float
    bytes_sent: int = 0
    said_verdict: bool = False
    partial_since_s: float | None = None
    """When a message of the joiner was first seen in part; None while there is none."""
    _sent_small: bool = False
    _waiting: deque[memoryview] = field(default_factory=deque)
    _reader: MessageReader = field(
        default_factory=lambda: MessageReader(frozenset({MessageType.ACK, MessageType.FAILED, MessageType.GOT}))
    )

    def say(self, kind: MessageType, body: bytes) -> None:
        """Puts a signed message behind what is being sent already."""
        self._waiting.append(memoryview(self.signer.seal(kind, body)))

    def say_verdict(self, verdict: str) -> None:
        """The last message; chunks that were not begun are not sent any more."""
        self.say(MessageType.VERDICT, encode(verdict))
        self.said_verdict = True

    @property
    def has_to_send(self) -> bool:
        """Whether it waits for its socket to take more."""
        return bool(self._waiting) or self._has_more()

    def send(self, now_s: float) -> None:
        """Sends what the socket takes. Raises ConnectionLostError."""
        left = _BYTES_A_TURN
        while left > 0:
            if not self._waiting:
                self._load_more()
            if not self._waiting:
                return
            try:
                sent = self.connection.sendmsg([*self._waiting][:4])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ConnectionLostError(str(error)) from error
            self.moved_s, left = now_s, left - sent
            self._drop(sent)

    def receive(self, now_s: float) -> Ack | Failed | MessageType | None:
        """What the joiner says: an ACK, a FAILED, or GOT. Raises WireError and ConnectionLostError."""
        message = read_message(self.connection, self._reader)
        if message is None:
            if not self._reader.has_begun:
                self.partial_since_s = None
            elif self.partial_since_s is None:
                self.partial_since_s = now_s
            return None
        self.moved_s, self.partial_since_s = now_s, None
        kind, sealed = message
        body = self.signer.open(kind, sealed)
        if kind is MessageType.ACK:
            return decode(body, Ack)
        return decode(body, Failed) if kind is MessageType.FAILED else kind

    def _has_more(self) -> bool:
        is_loaded = self.cargo.chunk_bytes > 0
        return (
            is_loaded and not self.said_verdict and not (self._sent_small and self.next_chunk == len(self.cargo.chunks))
        )

    def _load_more(self) -> None:
        if not self._has_more():
            return
        if self.next_chunk < len(self.cargo.chunks):
            chunk = self.cargo.chunks[self.next_chunk]
            header = chunk_header(self.next_chunk, len(chunk), self.cargo.checksum_of(self.next_chunk))
            self._waiting += (memoryview(header), chunk)
            self.bytes_sent += len(chunk)
            self.next_chunk += 1
        else:
            self.say(MessageType.SMALL, self.cargo.small)
            self.bytes_sent += len(self.cargo.small)
            self._sent_small = True

    def _drop(self, sent: int) -> None:
        while self._waiting and sent >= len(self._waiting[0]):
            sent -= len(self._waiting.popleft())
        if sent:
            self._waiting[0] = self._waiting[0][sent:]


def read_message(connection: socket.socket, reader: MessageReader) -> tuple[MessageType, bytes] | None:
    """A whole message, if what has come makes one. Raises ConnectionLostError at the end of the stream."""
    while True:
        try:
            data = connection.recv(min(reader.wanted(), _READ_BYTES_MAX))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise ConnectionLostError(str(error)) from error
        if not data:
            raise ConnectionLostError("the other side closed the connection")
        message = reader.feed(data)
        if message is not None:
            return message


__all__ = ["Cargo", "ConnectionLostError", "Greeting", "Session", "WireError", "read_message"]
