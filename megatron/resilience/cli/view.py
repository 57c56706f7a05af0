"""How a running job looks: one merged log, and how far it is: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TextIO

from megatron.resilience.agent.output import LineSink
from megatron.resilience.agent.progress import Progress

PROGRESS_INTERVAL_S = 10.0


class View(Protocol):
    """What the job tells its user while it runs."""

    def show(self, lines: list[str]) -> None:
        """Shows lines of the log, or of our own."""

    def progress(self, progress: Progress) -> None:
        """Training has come further."""

    def close(self) -> None:
        """No more comes, except by `show`."""


class PlainView:
    """For files and pipes: a progress line at most every `interval_s`."""

    def __init__(
        self, sink: LineSink, *, interval_s: float = PROGRESS_INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sink = sink
        self._interval_s = interval_s
        self._clock = clock
        self._shown_s = clock()

    def show(self, lines: list[str]) -> None:
        """Writes `lines`."""
        self._sink.write(lines)

    def progress(self, progress: Progress) -> None:
        """Writes a line if the last is old enough."""
        now_s = self._clock()
        if now_s - self._shown_s >= self._interval_s:
            self._shown_s = now_s
            self._sink.write([f"progress: {progress.describe()}"])

    def close(self) -> None:
        """Nothing is open."""


class LiveView:
    """For a terminal: the log scrolls above one status line."""

    def __init__(self, stream: TextIO) -> None:
        # Imported here: scripts and pipes, the common case, needn't wait for it.
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=False)
        self._live.start()

    def show(self, lines: list[str]) -> None:
        """Prints `lines` above the status line, as they are."""
        for line in lines:
            self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def progress(self, progress: Progress) -> None:
        """Redraws the status line."""
        from rich.text import Text

        loss = "" if progress.last_loss is None else f", loss {progress.last_loss:.4f}"
        self._live.update(Text(f"progress: {progress.describe()}{loss}", style="bold"), refresh=True)

    def close(self) -> None:
        """Removes the status line."""
        self._live.stop()


def open_view(stream: TextIO) -> View:
    """The view that fits `stream`."""
    return LiveView(stream) if stream.isatty() else PlainView(LineSink(stream.fileno()))
