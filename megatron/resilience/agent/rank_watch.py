"""Follows one rank from start to end: its output into a file and into lines, its exception, its end.

Owned by the spawner's loop, which calls it when a descriptor is readable or the process was reaped.
"""

from __future__ import annotations

import collections
import enum
import json
import os
from pathlib import Path
from typing import IO

from megatron.resilience.agent.failure import FailureReport, last_words
from megatron.resilience.agent.log_merge import LineSplitter
from megatron.resilience.agent.rank_start import StartedRank

_CHUNK_BYTES = 64 * 1024
_TAIL_LINES = 200


class RankState(enum.Enum):
    """RUNNING; DRAINING: ended, its last output is being read; CLOSED."""

    RUNNING = "running"
    DRAINING = "draining"
    CLOSED = "closed"


class RankWatch:
    """One rank. `log_path` None keeps no file."""

    def __init__(self, started: StartedRank, *, group_rank: int, log_path: Path | None) -> None:
        self.started = started
        self.state = RankState.RUNNING
        self.status = 0
        self.drain_deadline_s = float("inf")
        self._group_rank = group_rank
        self._log_path = log_path
        self._log: IO[bytes] | None = None
        self._splitter = LineSplitter()
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._signals_sent: set[int] = set()
        self._raised: FailureReport | None = None
        self._report = b""
        self._ended_s = 0.0
        self._is_output_open = True

    def open(self) -> None:
        """Opens the log file. Raises OSError."""
        if self._log_path is not None:
            self._log = self._log_path.open("wb", buffering=0)

    def send(self, number: int) -> None:
        """Sends a signal to the rank's process, not to its helpers; it then counts as ours."""
        if self.state is RankState.RUNNING:
            self._signals_sent.add(number)
            os.kill(self.started.pid, number)  # not reaped yet, so the pid is still its own

    def read_output(self) -> tuple[list[str], bool]:
        """(lines completed, whether there may be more later). Reads once; never blocks."""
        try:
            data = os.read(self.started.output, _CHUNK_BYTES)
        except BlockingIOError:
            return [], True
        self._is_output_open = bool(data)
        lines = self._splitter.feed(data) if data else self._splitter.flush()
        problem = self._keep(data)
        self._tail.extend(lines)
        return lines + problem, bool(data)

    def read_report(self) -> tuple[FailureReport | None, bool]:
        """(the exception the rank reported, once it has arrived whole; whether there may be more later)."""
        try:
            data = os.read(self.started.report, _CHUNK_BYTES)
        except BlockingIOError:
            return None, True
        self._report += data
        if self._raised is not None or b"\n" not in self._report:
            return None, bool(data)
        fields = json.loads(self._report.split(b"\n", 1)[0])
        self._raised = FailureReport(
            global_rank=self.started.global_rank,
            group_rank=self._group_rank,
            time_s=fields["time_s"],
            exception=fields["exception"],
            details=fields["details"],
            log_path=self._log_name(),
        )
        return self._raised, bool(data)

    def end(self, status: int, *, now_s: float, drain_s: float) -> None:
        """The process was reaped with `status`: exit code, or minus the signal."""
        self.state = RankState.DRAINING
        self.status = status
        self._ended_s = now_s
        self.drain_deadline_s = now_s + drain_s if self._is_output_open else now_s

    @property
    def has_failed(self) -> bool:
        """Whether it raised, or ended otherwise than by exit code 0 or a signal of ours."""
        ended_badly = self.state is not RankState.RUNNING and self.status != 0
        return self._raised is not None or (ended_badly and -self.status not in self._signals_sent)

    def failure(self) -> FailureReport | None:
        """How it failed, or None if it didn't. An exception outweighs what its process did afterwards."""
        if not self.has_failed:
            return None
        exception, details = last_words(self._tail)
        time_s = self._ended_s
        if self._raised is not None:
            exception, details, time_s = self._raised.exception, self._raised.details, self._raised.time_s
        killed = self.status < 0 and self._raised is None
        return FailureReport(
            global_rank=self.started.global_rank,
            group_rank=self._group_rank,
            time_s=time_s,
            exit_code=self.status if self.status >= 0 else None,
            signal_number=-self.status if killed else None,
            exception=exception,
            details=details,
            log_path=self._log_name(),
        )

    def close(self) -> list[str]:
        """Closes pipes and file; returns the last, unfinished line if there is one. Idempotent."""
        if self.state is RankState.CLOSED:
            return []
        self.state = RankState.CLOSED
        lines = self._splitter.flush()
        self._tail.extend(lines)
        os.close(self.started.output)
        os.close(self.started.report)
        if self._log is not None:
            self._log.close()
        return lines

    def _keep(self, data: bytes) -> list[str]:
        if self._log is None:
            return []
        try:
            while data:
                data = data[self._log.write(data) or 0 :]
        except OSError as error:
            self._log.close()
            self._log = None
            return [f"(log file {self._log_path} can't be written, going on without: {error.strerror})"]
        return []

    def _log_name(self) -> str:
        return "" if self._log_path is None else str(self._log_path)
