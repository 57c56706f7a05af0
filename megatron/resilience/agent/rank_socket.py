"""The local socket of an agent, on which its ranks report and hear commands. Used by the agent's shell.

A Unix socket with an abstract name that is drawn at random: nothing lies on a disk, and it ends with the agent. Who
connects must run as the same user (SO_PEERCRED), know the job's token, and be a rank that the agent has started.
Frames are bounded, commands for a rank that has not connected yet are kept, bounded.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable

import msgspec

from megatron.resilience.agent.rank_frames import (
    INTRODUCTION_BYTES_MAX,
    FrameError,
    FrameReader,
    Introduction,
    Reception,
    frame,
    socket_address,
)
from megatron.resilience.protocol.messages import MessageError, Party, RankCommand, RankReport, decode, encode

KEPT_COMMANDS_MAX = 1024
"""For a rank that has not connected. More push the oldest out: what matters is said again by the controller."""
UNREAD_BYTES_MAX = 64 << 20
"""That a rank may leave in its socket; then it is cut off."""
REPORT_BYTES_MAX = 1 << 20
CONNECTIONS_MAX = 1024
_INTRODUCTION_S = 10.0
_CHUNK_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3i")

Heard = Callable[[int, int, RankReport], None]
"""(global rank, generation in which it was started, report)."""


class RankSocket:
    """See the module. Lives in the agent's event loop; `send` and `forget` never block."""

    def __init__(
        self,
        *,
        token: str,
        is_ours: Callable[[int, int], bool],
        heard: Heard,
        say: Callable[[str], None],
    ) -> None:
        self.path = f"@trainmover-{secrets.token_hex(16)}"
        self._token = token
        self._is_ours = is_ours
        self._heard = heard
        self._say = say
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._kept: dict[int, collections.deque[bytes]] = {}
        self._connections = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens at `path`. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(socket_address(self.path))
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, backlog=CONNECTIONS_MAX)

    def stop(self) -> None:
        """Hangs up on all."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    def send(self, global_rank: int, command: RankCommand) -> None:
        """Sends, or keeps for the rank until it has connected."""
        data = frame(encode(command))
        writer = self._writers.get(global_rank)
        if writer is None:
            self._kept.setdefault(global_rank, collections.deque(maxlen=KEPT_COMMANDS_MAX)).append(data)
            return
        writer.write(data)
        if writer.transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self._say(f"global rank {global_rank} has not read {UNREAD_BYTES_MAX} bytes of commands and is cut off")
            writer.transport.abort()

    def forget(self, global_rank: int) -> None:
        """Its process has ended: what was kept for it, and its connection, go."""
        self._kept.pop(global_rank, None)
        writer = self._writers.pop(global_rank, None)
        if writer is not None:
            writer.close()

    # ------------------------------------------------------------------ one connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        frames = FrameReader(INTRODUCTION_BYTES_MAX)
        who: Introduction | None = None
        try:
            known, payloads = await asyncio.wait_for(self._receive(reader, writer, frames), _INTRODUCTION_S)
            who, frames.bytes_max = known, REPORT_BYTES_MAX
            self._report(known, payloads)
            while data := await reader.read(_CHUNK_BYTES):
                self._report(known, frames.feed(data))
        except (FrameError, MessageError, msgspec.DecodeError, TimeoutError, OSError) as error:
            name = "a process that did not introduce itself" if who is None else f"global rank {who.global_rank}"
            self._say(f"{name} at the agent's socket is cut off: {error or 'it took too long'}")
        finally:
            self._connections -= 1
            if who is not None and self._writers.get(who.global_rank) is writer:
                del self._writers[who.global_rank]
            writer.close()

    async def _receive(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: FrameReader
    ) -> tuple[Introduction, list[bytes]]:
        """The rank that introduces itself, and what it has sent with it. Raises FrameError once it was refused."""
        payloads: list[bytes] = []
        while not payloads:
            data = await reader.read(_CHUNK_BYTES)
            if not data:
                raise FrameError("it hung up")
            payloads = frames.feed(data)
        who = msgspec.msgpack.decode(payloads[0], type=Introduction)
        refusal = self._refusal(who, writer)
        writer.write(frame(msgspec.msgpack.encode(Reception(refusal=refusal))))
        if refusal:
            with contextlib.suppress(OSError):
                await writer.drain()
            raise FrameError(refusal)
        for kept in self._kept.pop(who.global_rank, ()):
            writer.write(kept)
        self._writers[who.global_rank] = writer
        return who, payloads[1:]

    def _refusal(self, who: Introduction, writer: asyncio.StreamWriter) -> str:
        peer: socket.socket = writer.get_extra_info("socket")
        _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user not in (os.geteuid(), 0):
            return f"found a process of user {user}, expected one of user {os.geteuid()}"
        if not hmac.compare_digest(who.token.encode(), self._token.encode()):
            return "found another token than the job's, expected TRAINMOVER_TOKEN as the agent set it"
        if not self._is_ours(who.global_rank, who.generation):
            return (
                f"found global rank {who.global_rank} of generation {who.generation}, expected one that this agent has "
                "started; a rank takes both from its environment"
            )
        if who.global_rank in self._writers:
            return f"found a second connection of global rank {who.global_rank}, expected one a process"
        if self._connections > CONNECTIONS_MAX:
            return f"found {self._connections} connections, expected at most {CONNECTIONS_MAX}"
        return ""

    def _report(self, who: Introduction, payloads: list[bytes]) -> None:
        for payload in payloads:
            self._heard(who.global_rank, who.generation, decode(payload, sender=Party.RANK, receiver=Party.AGENT))
