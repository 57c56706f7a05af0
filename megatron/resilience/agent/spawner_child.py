"""A spawner as its agent holds it: one slot's ranks, started for one generation. Used by the agent's shell.

The spawner prints where the agent prints. Its events come over a socket; closing our side tells it to kill its ranks,
which is also what happens if this process dies.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from megatron.resilience.agent import events

_CHUNK_BYTES = 64 * 1024


class SpawnerChild:
    """One started spawner. Reading never blocks; signals go only to a process that was not reaped."""

    def __init__(self, *, generation: int, slot: int, ranks: Sequence[int]) -> None:
        self.generation = generation
        self.slot = slot
        self.ranks = tuple(ranks)
        self.living: set[int] = set(ranks)
        """Ranks whose end was not told yet."""
        self.has_failed = False
        self.is_ordered_to_end = False
        self._buffer = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts it; `command` gets the descriptor of the socket as its --report-fd. Raises OSError."""
        ours, theirs = socket.socketpair()
        self._channel = ours
        with theirs:
            at = list(command).index("--")
            self._process = subprocess.Popen(
                [*command[:at], "--report-fd", str(theirs.fileno()), *command[at:]],
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.setblocking(False)

    @property
    def pid(self) -> int:
        """Of the spawner."""
        assert self._process is not None
        return self._process.pid

    @property
    def channel(self) -> socket.socket:
        """Readable when events have come."""
        assert self._channel is not None
        return self._channel

    def read_events(self) -> tuple[list[events.AgentEvent], bool]:
        """(events that have come, whether there may be more later)."""
        has_more = True
        try:
            data = self.channel.recv(_CHUNK_BYTES)
            has_more = bool(data)
        except BlockingIOError:
            data = b""
        except ConnectionError:
            data, has_more = b"", False
        *whole, self._buffer = (self._buffer + data).split(b"\n")
        return [events.decode(line.decode()) for line in whole], has_more

    def send(self, number: int) -> None:
        """Sends a signal to the spawner, which passes it on to its ranks."""
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, number)

    def order_end(self) -> None:
        """Tells the spawner to kill its ranks and end; one that is still importing simply ends."""
        self.is_ordered_to_end = True
        if self._process is None or self._process.returncode is not None:
            return
        try:
            self.channel.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it has just ended
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the spawner itself; the kernel then ends its ranks."""
        self.send(signal.SIGKILL)

    def end(self, status: int) -> None:
        """Its process was reaped with `status`: exit code, or minus the signal."""
        assert self._process is not None
        self._process.returncode = status

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        if self._channel is not None:
            self._channel.close()
