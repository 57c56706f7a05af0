"""One machine of a job, as the launcher holds it: its spawner's process, its output, and the socket to it."""

from __future__ import annotations

import collections
import os
import select
import signal
import socket
import subprocess

from megatron.resilience.agent import events
from megatron.resilience.agent.log_merge import LineSplitter

_CHUNK_BYTES = 64 * 1024
_TAIL_LINES = 100


class Machine:
    """A started spawner. Reading never blocks; signals go only to a process that wasn't reaped."""

    def __init__(self, group_rank: int, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        assert process.stdout is not None
        self.group_rank = group_rank
        self.slot: int | None = group_rank
        """That it holds. With agents it may change, and there may be none."""
        self.is_ended = False
        self.signals_sent: set[int] = set()
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self.output = process.stdout
        self.channel = channel
        self._process = process
        self._lines = LineSplitter(line_bytes_max=2 * _CHUNK_BYTES)
        self._events = b""
        self._open = [self.output.fileno(), channel.fileno()]
        self._finished: list[int] = []
        for descriptor in self._open:
            os.set_blocking(descriptor, False)

    def read_lines(self) -> list[str]:
        """Lines that have come from its ranks or, without their prefix, from the spawner itself."""
        data = self._receive(self.output.fileno())
        if data is None:
            return []
        lines = self._lines.feed(data) if data else self._lines.flush()
        self.tail.extend(lines)
        return lines

    def read_events(self) -> list[events.AgentEvent]:
        """Events that have come."""
        *whole, self._events = (self._events + (self._receive(self.channel.fileno()) or b"")).split(b"\n")
        return [events.decode(line.decode()) for line in whole]

    def _receive(self, descriptor: int) -> bytes | None:
        """What has come; empty at its end, which is noted; None if there is nothing at present."""
        if descriptor not in self._open:
            return None
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        except ConnectionError:
            data = b""
        if not data:
            self._open.remove(descriptor)
            self._finished.append(descriptor)
        return data

    def take_finished_streams(self) -> list[int]:
        """Descriptors that have come to their end since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def is_readable(self) -> bool:
        """Whether more has come. Once its process has ended, False means that all was read."""
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        return bool(self._open) and bool(poll.poll(0))

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the spawner."""
        if not self.is_ended:
            self.signals_sent.add(number)
            os.kill(self._process.pid, number)

    def order_kill(self) -> None:
        """Tells the spawner to kill its ranks and end; one that is still importing simply ends."""
        if not self.is_ended:
            try:
                self.channel.shutdown(socket.SHUT_WR)
            except OSError:
                return  # it has just ended
            self.send(signal.SIGTERM)

    def end(self, status: int) -> None:
        """Its process was reaped."""
        self._process.returncode = status
        self.is_ended = True

    def close(self) -> None:
        """Closes both streams. A spawner that still lives is killed by whoever sweeps."""
        self.output.close()
        self.channel.close()
        if not self.is_ended:
            self.end(-signal.SIGKILL)
