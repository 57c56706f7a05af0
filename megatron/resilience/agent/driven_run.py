"""A `trainmover run` that another program drives: started, read line by line with the time of each, and ended.

Used by what compares whole jobs (proofs and baselines). The launcher ends with its driver.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron.resilience.agent.environment import inherited_environment
from megatron.resilience.agent.failure import EXIT_USAGE
from megatron.resilience.agent.process_tree import set_parent_death_signal

_POLL_S = 0.005
_TAIL_LINES = 20
_END_S = 60


class RunError(RuntimeError):
    """A run failed, or ended before what was waited for had happened."""


class RunRefusedError(RunError):
    """A run did not start, because its command line cannot be used. `line`: what it said of that."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line


class DrivenRun:
    """See the module. Nothing is read but in `read`, `wait` and `wait_for`."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], path: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self._output, self._log, self._path = process.stdout, log, path
        self._lines: list[tuple[float, str]] = []
        self._partial = b""
        self._selector = selectors.DefaultSelector()
        os.set_blocking(self._output.fileno(), False)
        self._selector.register(self._output, selectors.EVENT_READ)

    def read(self, timeout_s: float) -> bool:
        """Takes what has come; False at its end."""
        if not self._selector.select(timeout_s):
            return True
        data = os.read(self._output.fileno(), 1 << 16)
        self._log.write(data)
        self._log.flush()
        *whole, self._partial = (self._partial + data).split(b"\n")
        now_s = time.time()
        self._lines += [(now_s, line.decode(errors="replace")) for line in whole]
        return bool(data)

    def first_line_s(self, text: str) -> float | None:
        """When the first line with `text` came, in seconds since the epoch."""
        return next((at_s for at_s, line in self._lines if text in line), None)

    def wait_for(self, happened: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Until `happened()`. Raises RunError when the job ends before, or the time is up; RunRefusedError."""
        while not happened():
            if not self.read(_POLL_S):
                self._code(deadline_s)
                raise RunError(f"found the job's end before {what}; {self.tail()}")
            self._check_time(deadline_s, what)

    def wait(self, deadline_s: float) -> None:
        """Until it has ended well. Raises RunError; RunRefusedError for exit code 2."""
        while self.read(_POLL_S):
            self._check_time(deadline_s, "its end")
        code = self._code(deadline_s)
        if code:
            raise RunError(f"found exit code {code}, expected 0; {self.tail()}")

    def _code(self, deadline_s: float) -> int:
        """The exit code, once its output has ended. Raises RunError, RunRefusedError."""
        try:
            code = self.process.wait(timeout=max(1.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise RunError(f"found its output ended and no exit code within the limit; {self.tail()}") from error
        if code == EXIT_USAGE:
            said = [line for _, line in self._lines if line.strip()]
            raise RunRefusedError(said[-1] if said else f"found exit code {code}, expected 0, and no word said")
        return code

    def _check_time(self, deadline_s: float, awaited: str) -> None:
        if time.monotonic() > deadline_s:
            raise RunError(f"found no sign of {awaited} within the limit; {self.tail()}")

    def tail(self) -> str:
        """The end of its output, for an error."""
        lines = "\n".join(line for _, line in self._lines[-_TAIL_LINES:])
        return f"its output ({self._path}) ends:\n{lines}"

    def end(self) -> None:
        """Ends the process if it still runs."""
        self._selector.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._output.close()


@contextmanager
def driven_run(
    flags: Sequence[str], script: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[DrivenRun]:
    """`trainmover run FLAGS -- SCRIPT`, with `variables` in its environment, its output kept in `log`.

    At the end it has ended.
    """
    command = [sys.executable, "-m", "megatron.resilience.cli.main", "run", *flags, "--", *script]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**inherited_environment(), **(variables or {})},
            preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
        )
        run = DrivenRun(process, output, log)
        try:
            yield run
        finally:
            run.end()
