"""What goes over the local socket between an agent and its ranks: frames, and the rank's introduction. Pure.

A frame is its length (4 bytes, big endian) and that many bytes. A rank's first frame is an `Introduction`; the agent
answers with a `Reception`. After that each frame is a message of the protocol. Used by both ends of the socket.
"""

from __future__ import annotations

import msgspec

FRAME_BYTES_MAX = 16 << 20
"""Of one frame: a directory of 16,384 endpoints is about 4 MiB."""
INTRODUCTION_BYTES_MAX = 4096
_LENGTH_BYTES = 4


class FrameError(Exception):
    """Bytes that are no frame of this socket; the connection is of no use any more."""


class Introduction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First word of a rank."""

    token: str
    """Of the job."""
    global_rank: int
    generation: int
    """In which it was started: 1, or what TRAINMOVER_JOIN_GENERATION says."""


class Reception(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent's answer; a refusal is its last word."""

    refusal: str = ""


def frame(payload: bytes) -> bytes:
    """`payload` with its length before it. Raises FrameError if it is too long."""
    _check(len(payload), FRAME_BYTES_MAX)
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


class FrameReader:
    """Cuts a stream of bytes into payloads. Keeps at most one unfinished frame."""

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that are whole with `data`. Raises FrameError for one that is too long."""
        self._buffer += data
        payloads: list[bytes] = []
        while (payload := self._next()) is not None:
            payloads.append(payload)
        return payloads

    def _next(self) -> bytes | None:
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        _check(length, self.bytes_max)
        end = _LENGTH_BYTES + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH_BYTES:end])
        del self._buffer[:end]
        return payload


def _check(length: int, bytes_max: int) -> None:
    if length > bytes_max:
        raise FrameError(f"found a frame of {length} bytes, expected at most {bytes_max}; dropping the connection")


def socket_address(path: str) -> str:
    """What connect() and bind() take: `@name` stands for a name that is no file and ends with its last user."""
    return "\0" + path[1:] if path.startswith("@") else path
