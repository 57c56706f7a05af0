"""When a run ends before its last iteration: signal, time limit, exit interval. Decided the same on every rank.

`EndingWatch` only collects what this rank saw; `agree()` makes it one answer by one small all-reduce an iteration,
and only where a flag asks for something that ranks could see differently.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import Any

import torch

from megatron.training.config import RunSettings

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Ending(IntEnum):
    """Why a run ends; of several, the greatest number counts."""

    GOES_ON = 0
    INTERVAL_REACHED = 1
    TIME_IS_UP = 2
    SIGNAL_CAME = 3

    @property
    def words(self) -> str:
        """For the closing line."""
        return {
            Ending.GOES_ON: "all iterations done",
            Ending.INTERVAL_REACHED: "--exit-interval reached",
            Ending.TIME_IS_UP: "--exit-duration-in-mins is over",
            Ending.SIGNAL_CAME: "a signal asked for it",
        }[self]


class EndingWatch:
    """Watches signals and the clock from `start()` on, for one rank.

    One that `joins` has no say in when the run ends: a signal ends its process, until it has another rank's state.
    """

    def __init__(self, run: RunSettings, *, joins: bool = False) -> None:
        self._run = run
        self._joins = joins
        self._signal_came = False
        self._started_s = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def start(self) -> None:
        """Takes over the exit signals if `--exit-signal-handler` is on, and starts the clock."""
        self._started_s = time.monotonic()
        if self._run.exit_signal_handler:
            for number in EXIT_SIGNALS:
                self._previous[number] = signal.signal(number, self._note_signal)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Between `start()` and `stop()`."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Gives the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def capture(self) -> dict[str, Any]:
        """How long the run has lasted, and whether a signal came, for the rank that takes this one's place."""
        return {"elapsed_s": time.monotonic() - self._started_s, "signal_came": self._signal_came}

    def restore(self, values: dict[str, Any]) -> None:
        """Takes over what another rank captured. A signal from now on asks for the end of the run."""
        self._started_s = time.monotonic() - values["elapsed_s"]
        self._signal_came = values["signal_came"]
        self._joins = False

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._joins:
            self._signal_came = True
            return
        words = f"{signal.Signals(number).name} came before this rank had another's state: it cannot join, and ends\n"
        os.write(2, words.encode())  # print() may be under way already
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def seen(self, iteration: int) -> Ending:
        """The ending after `iteration` for all that this rank has seen."""
        limit_min = self._run.exit_duration_in_mins
        if self._signal_came:
            return Ending.SIGNAL_CAME
        if limit_min is not None and time.monotonic() - self._started_s > limit_min * 60:
            return Ending.TIME_IS_UP
        by_interval = bool(self._run.exit_interval and iteration % self._run.exit_interval == 0)
        return Ending.INTERVAL_REACHED if by_interval else Ending.GOES_ON

    def agree(self, iteration: int) -> Ending:
        """The ending after `iteration`, the same on all ranks. Collective where a signal or time limit is watched."""
        ending = self.seen(iteration)
        if self._run.exit_duration_in_mins is None and not self._run.exit_signal_handler:
            return ending
        vote = torch.tensor([int(ending)], dtype=torch.int32, device=torch.cuda.current_device())
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MAX)
        return Ending(int(vote.item()))
