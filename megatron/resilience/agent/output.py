"""Writes log lines to a descriptor that somebody else reads, without ever being held up for long by that reader.

Used by launcher and spawner for their own standard output. A reader that has gone, or that stops reading (a pager, a
stopped terminal), must not stop training: lines are then left out here; the log files have them all.
"""

from __future__ import annotations

import os
import select

# A pipe that polls as writable takes this much without blocking (PIPE_BUF).
_CHUNK_BYTES = 4096


class LineSink:
    """A bounded writer. After `stall_s` without progress it drops lines until the reader reads again."""

    def __init__(self, descriptor: int, stall_s: float = 2.0) -> None:
        self._descriptor = descriptor
        self._stall_ms = round(stall_s * 1000)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._dropped = 0
        self._is_open = True

    def write(self, lines: list[str]) -> None:
        """Writes `lines`, each with its newline. Blocks up to `stall_s`; never raises for a lost reader."""
        for line in lines:
            if not self._is_open:
                return
            notice = (
                f"({self._dropped} lines left out: nobody read; the log files have them)\n" if self._dropped else ""
            )
            if self._put((notice + line + "\n").encode("utf-8", errors="replace")):
                self._dropped = 0
            else:
                self._dropped += 1

    def _put(self, data: bytes) -> bool:
        sent = 0
        while sent < len(data):
            # Once stalled, lines are tried but not waited for; a line that was begun gets its time.
            if not self._poll.poll(0 if self._dropped and not sent else self._stall_ms):
                return False
            try:
                sent += os.write(self._descriptor, data[sent : sent + _CHUNK_BYTES])
            except (BrokenPipeError, ConnectionError):
                self._is_open = False
                return False
            except BlockingIOError:
                continue
        return True
