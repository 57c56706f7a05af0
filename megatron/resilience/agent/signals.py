"""Signals as something to select on: they wake the loop of launcher or spawner and are read there, one by one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
WATCHED_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD)


def is_ignored(number: int) -> bool:
    """Whether whoever started this process wants it to live through Ctrl-C or hang-up: nohup, a shell's background."""
    return number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) is signal.SIG_IGN


def _ignore(number: int, frame: object) -> None:
    """A handler has to exist for the wake-up descriptor to be written; the loop does the work."""


class SignalInbox:
    """Collects signals in a pipe. `open()` once, in the main thread; a forked child calls `leave_in_child()`."""

    def __init__(self, numbers: Iterable[signal.Signals] = WATCHED_SIGNALS) -> None:
        self._numbers = tuple(numbers)
        self._handled: list[signal.Signals] = []
        self._reader = -1
        self._writer = -1

    def open(self) -> None:
        """From now on the signals no longer end this process. Ctrl-C and hang-up stay ignored if they were (nohup)."""
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in self._numbers:
            if is_ignored(number):
                continue
            signal.signal(number, _ignore)
            self._handled.append(number)

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._reader

    def read(self) -> list[int]:
        """The signals since the last call, oldest first."""
        try:
            return list(os.read(self._reader, 4096))
        except BlockingIOError:
            return []

    def leave_in_child(self) -> None:
        """Gives a forked child the handlers that a new Python process has."""
        signal.set_wakeup_fd(-1)
        for number in self._handled:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.close(self._reader)
        os.close(self._writer)
