"""Speaks the handshake of csrc/wire/handshake.h to a rank, rightly or wrongly. For test_security.py, in its process."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket as sockets
import struct
from dataclasses import dataclass, replace
from enum import IntEnum

import trainmover_ext._C as _C

MAGIC = b"TMOV"
VERSION = 1
CHALLENGE, HELLO, WELCOME = 1, 2, 3
LIMIT_S = 8.0


class Purpose(IntEnum):
    CONTROL = 1
    LINK = 2
    SEGMENT = 3


class Verdict(IntEnum):
    WELCOME = 0
    WRONG_JOB = 1
    WRONG_RANK = 2
    WRONG_INCARNATION = 3
    STALE_GENERATION = 4
    DUPLICATE = 5
    UNKNOWN = 6
    BUSY = 7


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a rank is reached, from its endpoint."""

    address: tuple[str, int]
    socket: str
    incarnation: int

    @classmethod
    def of(cls, endpoint: str) -> Target:
        fields = json.loads(endpoint)
        host, _, port = fields["address"].rpartition(":")
        return cls(address=(host, int(port)), socket=fields["socket"], incarnation=fields["incarnation"])

    def connect(self, *, local: bool) -> sockets.socket:
        made = sockets.socket(sockets.AF_UNIX if local else sockets.AF_INET)
        made.settimeout(LIMIT_S)
        made.connect(f"\0{self.socket}" if local else self.address)
        return made


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a caller says of itself; the defaults are those of a member of the job."""

    token: str
    to_incarnation: int
    from_incarnation: int
    purpose: int = Purpose.CONTROL
    job: str = "trainmover"
    communicator: int = 0
    generation: int = 0
    from_rank: int = 1
    to_rank: int = 0
    version: int = VERSION
    length: int | None = None

    def but(self, **changes: object) -> Hello:
        return replace(self, **changes)  # type: ignore[arg-type]

    def signed(self, challenge: bytes) -> bytes:
        """The message, in answer to `challenge`."""
        digest = hashlib.sha256(f"{self.job}\n{_C.job_constants()}".encode()).digest()
        body = struct.pack("<BHB", HELLO, self.version, self.purpose) + digest
        body += struct.pack("<QQII", self.communicator, self.generation, self.from_rank, self.to_rank)
        body += struct.pack("<QQ", self.from_incarnation, self.to_incarnation) + os.urandom(16)
        length = len(body) + 32 if self.length is None else self.length
        message = struct.pack("<I", length) + body
        nonce = challenge[-16:]
        return message + hmac.digest(self.token.encode(), b"trainmover handshake HELLO" + nonce + message, "sha256")


def communicator_id(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") | 1


def read_message(connection: sockets.socket) -> bytes:
    """One message with its length; shorter when the connection ends. Raises TimeoutError when neither comes."""
    message = b""
    wanted = 4
    while len(message) < wanted:
        try:
            more = connection.recv(wanted - len(message))
        except ConnectionError:
            more = b""
        if not more:
            return message
        message += more
        if len(message) == 4:
            wanted = 4 + struct.unpack("<I", message)[0]
    return message


def challenge_of(connection: sockets.socket) -> bytes:
    challenge = read_message(connection)
    assert challenge[4] == CHALLENGE
    assert challenge[5:9] == MAGIC
    return challenge


def verdict_of(connection: sockets.socket, hello: Hello) -> Verdict | None:
    """The answer to `hello`; None: closed without a word."""
    connection.sendall(hello.signed(challenge_of(connection)))
    answer = read_message(connection)
    if not answer:
        return None
    assert answer[4] == WELCOME
    return Verdict(answer[5])


def is_closed(connection: sockets.socket) -> bool:
    """Waits for the other side to close. Raises TimeoutError when it does not."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True
