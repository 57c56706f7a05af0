"""A rank's line to the agent of its machine: reports go out, commands come in, and training never waits for either.

The worker's boundary hook owns one. A daemon thread of its own does the I/O and sleeps in poll() between messages. The
agent's death is the rank's (its spawner sees to it), so a lost line is not made again: `send` then raises. A forked
child has no line: its copy is closed at the fork. No torch here.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from megatron.resilience.agent.rank_frames import (
    FrameError,
    FrameReader,
    Introduction,
    Reception,
    frame,
    socket_address,
)
from megatron.resilience.protocol.messages import MessageError, Party, RankCommand, RankReport, decode, encode

QUEUED_REPORTS_MAX = 1024
QUEUED_BYTES_MAX = 16 << 20
_CHUNK_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3i")


class AgentLinkError(Exception):
    """The line to the agent cannot be made, is lost, or its queue is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkIdentity:
    """Who introduces itself at the agent's socket."""

    token: str
    global_rank: int
    generation: int = 1


class AgentLink:
    """See the module. `start()` connects; all other calls are quick and may come from any thread."""

    def __init__(self, path: str, identity: LinkIdentity) -> None:
        self.path = path
        self.identity = identity
        self._lock = threading.Condition()
        self._socket: socket.socket | None = None
        self._wake = -1
        self._outgoing: collections.deque[bytes] = collections.deque()
        self._outgoing_bytes = 0
        self._commands: collections.deque[RankCommand] = collections.deque()
        self._lost = "it was not started"
        self._closing = False
        self._thread: threading.Thread | None = None
        self.at_once: Callable[[RankCommand], bool] | None = None
        """Asked on the line's thread about each command first; what it takes is not for `take`."""

    def start(self, timeout_s: float = 10.0) -> None:
        """Connects and introduces this rank; blocks up to `timeout_s`. Raises AgentLinkError."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(timeout_s)
            connected.connect(socket_address(self.path))
            self._check_owner(connected)
            reader = self._introduce(connected, timeout_s)
        except (OSError, FrameError, msgspec.DecodeError) as error:
            connected.close()
            raise AgentLinkError(
                f"global rank {self.identity.global_rank}: no line to the agent at {self.path}: {error}; "
                "expected the agent that started this rank; its output says what became of it"
            ) from error
        connected.setblocking(False)
        with self._lock:
            self._socket, self._lost = connected, ""
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        _LINKS.add(self)
        self._thread = threading.Thread(target=self._serve, args=(reader,), name="agent-link", daemon=True)
        self._thread.start()

    def _check_owner(self, connected: socket.socket) -> None:
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user not in (os.geteuid(), 0):
            raise FrameError(f"found a process of user {user} there, expected one of user {os.geteuid()}")

    def _introduce(self, connected: socket.socket, timeout_s: float) -> FrameReader:
        deadline_s = time.monotonic() + timeout_s
        who = self.identity
        introduction = Introduction(token=who.token, global_rank=who.global_rank, generation=who.generation)
        connected.sendall(frame(msgspec.msgpack.encode(introduction)))
        reader = FrameReader()
        while True:
            connected.settimeout(max(0.001, deadline_s - time.monotonic()))
            data = connected.recv(4096)
            if not data:
                raise FrameError("it hung up without a word")
            payloads = reader.feed(data)
            if payloads:
                break
        reception = msgspec.msgpack.decode(payloads[0], type=Reception)
        if reception.refusal:
            raise FrameError(reception.refusal)
        self._commands.extend(_command(payload) for payload in payloads[1:])  # sent right after it
        return reader

    @property
    def is_open(self) -> bool:
        """Whether the agent can be told something."""
        return not self._lost

    def send(self, report: RankReport) -> None:
        """Queues `report`; returns at once. Raises AgentLinkError when the line is lost or the queue full."""
        data = frame(encode(report))
        with self._lock:
            if self._lost:
                raise AgentLinkError(
                    f"global rank {self.identity.global_rank}: the agent is out of reach: {self._lost}"
                )
            if len(self._outgoing) >= QUEUED_REPORTS_MAX or self._outgoing_bytes + len(data) > QUEUED_BYTES_MAX:
                raise AgentLinkError(
                    f"global rank {self.identity.global_rank}: found {len(self._outgoing)} reports of "
                    f"{self._outgoing_bytes} bytes waiting for the agent, expected it to read them; it hangs or is "
                    "stopped: look at its machine"
                )
            self._outgoing.append(data)
            self._outgoing_bytes += len(data)
            os.eventfd_write(self._wake, 1)

    def take(self) -> list[RankCommand]:
        """The commands that have come since the last call, in order. Never blocks."""
        if not self._commands:  # the usual case, in every iteration: no lock
            return []
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def wait(self, timeout_s: float) -> bool:
        """Blocks until a command is there to take, the line is lost, or `timeout_s`; True if there is a command."""
        with self._lock:
            self._lock.wait_for(lambda: bool(self._commands or self._lost), timeout_s)
            return bool(self._commands)

    def flush(self, timeout_s: float) -> bool:
        """Blocks until all reports are in the agent's socket; False if `timeout_s` has passed or the line is lost."""
        with self._lock:
            self._lock.wait_for(lambda: bool(not self._outgoing_bytes or self._lost), timeout_s)
            return not self._outgoing_bytes

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends what is queued, bounded by `timeout_s`, and hangs up. Idempotent."""
        self.flush(timeout_s)
        with self._lock:
            self._closing = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # ------------------------------------------------------------------ the thread

    def _serve(self, reader: FrameReader) -> None:
        connected, wake = self._socket, self._wake
        assert connected is not None
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        reason = "closed"
        try:
            while not self._closing:
                wants = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
                poll.register(connected, wants)
                for descriptor, events in poll.poll():
                    if descriptor == wake:
                        os.eventfd_read(wake)
                        continue
                    if events & select.POLLOUT:
                        self._write(connected)
                    if events & ~select.POLLOUT:
                        self._read(connected, reader)
        except (OSError, FrameError, MessageError) as error:
            reason = str(error)
        self._lose(reason)

    def _write(self, connected: socket.socket) -> None:
        while self._outgoing:
            data = self._outgoing[0]
            try:
                sent = connected.send(data)
            except BlockingIOError:
                return
            with self._lock:
                self._outgoing_bytes -= sent
                if sent == len(data):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = data[sent:]
                self._lock.notify_all()

    def _read(self, connected: socket.socket, reader: FrameReader) -> None:
        try:
            data = connected.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise FrameError("the agent has hung up")
        commands = [_command(payload) for payload in reader.feed(data)]
        if self.at_once is not None:
            commands = [command for command in commands if not self.at_once(command)]
        if commands:
            with self._lock:
                self._commands.extend(commands)
                self._lock.notify_all()

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._lost = self._lost or reason
            self._lock.notify_all()
            self._drop_descriptors()

    def _drop_descriptors(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def forget_in_child(self) -> None:
        """In a forked child, which has no line: closes its copies, so that the agent sees the parent's end alone."""
        self._lock = threading.Condition()  # the old one may be held by a thread that does not exist here
        self._lost = "this process is a fork of the rank"
        self._commands.clear()
        self._outgoing.clear()
        self._outgoing_bytes = 0
        self._thread = None
        with contextlib.suppress(OSError):
            self._drop_descriptors()


def _command(payload: bytes) -> RankCommand:
    command: RankCommand = decode(payload, sender=Party.AGENT, receiver=Party.RANK)
    return command


_LINKS: weakref.WeakSet[AgentLink] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    for link in list(_LINKS):
        link.forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
