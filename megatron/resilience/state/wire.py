"""The bytes of a state transfer: messages, their signatures, and the reader that takes them apart. Pure, no sockets.

A joiner rank connects to its leaver rank. Numbers are little endian; a message is u32 length (of what follows the
type), u8 type, body. Bodies are msgpack but for CHALLENGE and CHUNK.

    leaver   CHALLENGE  magic, version u16, nonce A [16]
    joiner   HELLO      who asks whom for what: job, generation, global rank, layout, chunks it has already; nonce I
    leaver   WELCOME    accepted or refused and why; sizes
    leaver   CHUNK      index u32, length u32, checksum u64; the memory itself follows
    leaver   SMALL      the small state, once all chunks are sent
    joiner   ACK        digest over all checksums and the small state; or FAILED and why
    leaver   VERDICT    LEAVE or STAY, the last message; STAY may come in place of any CHUNK
    joiner   GOT        the verdict was read

All but CHALLENGE and CHUNK end in an HMAC-SHA-256 by the job's token over the type, both nonces and the body, so that
nothing signed here verifies for another type, side or connection. A HELLO that is wrongly signed gets no answer.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from megatron.resilience.state.errors import WireError
from megatron.resilience.state.small_tensors import SMALL_BYTES_MAX

MAGIC = b"TMST"
VERSION = 1
NONCE_BYTES = 16
MAC_BYTES = 32
CHUNK_BYTES_MAX = 64 << 20
CHUNKS_MAX = 1 << 24
REASON_CHARACTERS_MAX = 200
_PREFIX = struct.Struct("<IB")
_CHALLENGE = struct.Struct("<4sH16s")
_CHUNK = struct.Struct("<IIQ")
CHUNK_HEADER_BYTES = _PREFIX.size + _CHUNK.size


class MessageType(enum.IntEnum):
    """What a message is."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    CHUNK = 4
    SMALL = 5
    ACK = 6
    FAILED = 7
    VERDICT = 8
    GOT = 9


_BODY_BYTES_MAX = {
    MessageType.CHALLENGE: _CHALLENGE.size,
    MessageType.HELLO: 512,
    MessageType.WELCOME: 2048,
    MessageType.CHUNK: _CHUNK.size,
    MessageType.SMALL: SMALL_BYTES_MAX + MAC_BYTES + 16,
    MessageType.ACK: 256,
    MessageType.FAILED: 2048,
    MessageType.VERDICT: 64,
    MessageType.GOT: 64,
}


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The joiner rank presents itself."""

    job: bytes
    generation: int
    global_rank: int
    layout: bytes
    chunks_held: int
    nonce: bytes


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The leaver rank's answer. `reason` is empty when the transfer goes on."""

    reason: str
    total_bytes: int
    chunk_bytes: int


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Everything is in place."""

    digest: bytes


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """It will never be."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """Describes the memory that follows it."""

    index: int
    length: int
    checksum: int


@dataclass(slots=True, kw_only=True)
class Signer:
    """Signs and verifies for one connection, once both nonces are known."""

    token: str
    challenge_nonce: bytes
    hello_nonce: bytes = b""

    def mac(self, kind: MessageType, body: bytes | memoryview) -> bytes:
        """The HMAC of one message."""
        prefix = b"trainmover state " + bytes([kind]) + self.challenge_nonce + self.hello_nonce
        signature = hmac.new(self.token.encode(), prefix, hashlib.sha256)
        signature.update(body)
        return signature.digest()

    def seal(self, kind: MessageType, body: bytes) -> bytes:
        """The whole message."""
        return _PREFIX.pack(len(body) + MAC_BYTES, kind) + body + self.mac(kind, body)

    def open(self, kind: MessageType, sealed: bytes) -> bytes:
        """The body of a message whose signature is right. Raises WireError otherwise."""
        body, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
        if len(sealed) < MAC_BYTES or not hmac.compare_digest(mac, self.mac(kind, body)):
            raise WireError(f"a {kind.name} is not signed with this job's token; give both ranks the same token")
        return bytes(body)


def challenge(nonce: bytes) -> bytes:
    """The first message."""
    return _PREFIX.pack(_CHALLENGE.size, MessageType.CHALLENGE) + _CHALLENGE.pack(MAGIC, VERSION, nonce)


def read_challenge(body: bytes) -> bytes:
    """Its nonce. Raises WireError when something else answers at that address."""
    if len(body) != _CHALLENGE.size:
        raise WireError(f"found a CHALLENGE of {len(body)} bytes, expected {_CHALLENGE.size}")
    magic, version, nonce = _CHALLENGE.unpack(body)
    if magic != MAGIC or version != VERSION:
        raise WireError(
            f"found protocol {magic!r} {version}, expected {MAGIC!r} {VERSION}; run the same release on all machines"
        )
    return bytes(nonce)


def chunk_header(index: int, length: int, checksum: int) -> bytes:
    """What stands before a chunk's memory."""
    return _PREFIX.pack(_CHUNK.size, MessageType.CHUNK) + _CHUNK.pack(index, length, checksum)


def read_chunk_header(body: bytes) -> ChunkHeader:
    """The header in the body of a CHUNK."""
    if len(body) != _CHUNK.size:
        raise WireError(f"found a CHUNK header of {len(body)} bytes, expected {_CHUNK.size}")
    index, length, checksum = _CHUNK.unpack(body)
    return ChunkHeader(index=index, length=length, checksum=checksum)


Body = TypeVar("Body", Hello, Welcome, Ack, Failed, str)


def encode(body: Hello | Welcome | Ack | Failed | str) -> bytes:
    """A body as bytes."""
    return msgspec.msgpack.encode(body)


def decode(payload: bytes, kind: type[Body]) -> Body:
    """A body of type `kind`. Raises WireError for anything else."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"found bytes that are no {kind.__name__}: {error}; is it the same release?") from error


def hello_nonce(sealed: bytes) -> bytes:
    """The nonce in a HELLO whose signature covers it, so that the signature can be looked at."""
    hello = decode(sealed[:-MAC_BYTES], Hello)
    if len(hello.nonce) != NONCE_BYTES:
        raise WireError(f"found a nonce of {len(hello.nonce)} bytes, expected {NONCE_BYTES}")
    return hello.nonce


def total_digest(layout: bytes, checksums: list[int], small: bytes) -> bytes:
    """What both ranks must agree on before the leaver may leave."""
    digest = hashlib.sha256(layout)
    digest.update(b"".join(value.to_bytes(8, "little") for value in checksums))
    digest.update(hashlib.sha256(small).digest())
    return digest.digest()


@dataclass(slots=True)
class MessageReader:
    """Takes messages out of a stream without ever asking for a byte that belongs to what follows them.

    `wanted()` says how many bytes may be given next; `feed()` takes at most so many and returns a whole message as
    (type, rest after the prefix), or None. `expected` bounds what may come: anything else, and any length that its
    type cannot have, raises WireError before memory is reserved for it.
    """

    expected: frozenset[MessageType] = frozenset()
    _buffer: bytearray = field(default_factory=bytearray)
    _size: int = 0
    _kind: MessageType | None = None

    def wanted(self) -> int:
        """Bytes that are missing before something can be decided; at least 1."""
        return (self._size if self._kind is not None else _PREFIX.size) - len(self._buffer)

    @property
    def has_begun(self) -> bool:
        """Whether a message has come in part: its rest is due, where the next one may take its time."""
        return self._kind is not None or bool(self._buffer)

    def feed(self, data: bytes | memoryview) -> tuple[MessageType, bytes] | None:
        """Takes `data`, which is not longer than `wanted()`."""
        assert len(data) <= self.wanted()
        self._buffer += data
        if self._kind is None and len(self._buffer) == _PREFIX.size:
            self._begin(*_PREFIX.unpack(self._buffer))
        if self._kind is None or len(self._buffer) < self._size:
            return None
        message = self._kind, bytes(self._buffer)
        self._kind = None
        self._buffer = bytearray()
        return message

    def _begin(self, size: int, number: int) -> None:
        names = ", ".join(sorted(kind.name for kind in self.expected))
        if number not in self.expected:
            raise WireError(f"found a message of type {number}, expected {names}; does something else use this port?")
        kind = MessageType(number)
        if not 0 < size <= _BODY_BYTES_MAX[kind]:
            raise WireError(f"found a {kind.name} of {size} bytes, expected 1 to {_BODY_BYTES_MAX[kind]}")
        self._kind, self._size = kind, size
        self._buffer = bytearray()
