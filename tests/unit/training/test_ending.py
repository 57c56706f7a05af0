"""When a run ends early: what one rank sees becomes the same answer on all, and costs nothing where nobody asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training import device
from megatron.training.config import RunSettings
from megatron.training.ending import EXIT_SIGNALS, Ending, EndingWatch


@pytest.fixture
def votes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the all-reduces, which change nothing on one rank."""
    device.install_device()
    cast: list[int] = []

    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        cast.append(int(tensor.item()))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return cast


@pytest.mark.parametrize("number", EXIT_SIGNALS)
def test_a_signal_ends_the_run_at_the_next_boundary(votes: list[int], number: signal.Signals) -> None:
    watch = EndingWatch(RunSettings(exit_signal_handler=True))
    before = signal.getsignal(number)
    watch.start()
    assert watch.agree(1) is Ending.GOES_ON
    os.kill(os.getpid(), number)
    assert watch.agree(2) is Ending.SIGNAL_CAME
    watch.stop()
    assert signal.getsignal(number) == before
    assert votes == [0, int(Ending.SIGNAL_CAME)]


ENDS = """
import os, signal, sys
from megatron.training.config import RunSettings
from megatron.training.ending import Ending, EndingWatch
watch = EndingWatch(RunSettings(exit_signal_handler=True), joins=True)
watch.start()
if sys.argv[2] == "whole":
    watch.restore({"elapsed_s": 1.0, "signal_came": False})
os.kill(os.getpid(), int(sys.argv[1]))
sys.exit(int(watch.seen(1)))
"""


@pytest.mark.parametrize("number", EXIT_SIGNALS)
@pytest.mark.parametrize("state", ["none", "whole"])
def test_a_signal_ends_who_joins_and_the_run_only_once_it_has_the_state(number: signal.Signals, state: str) -> None:
    command = [sys.executable, "-c", ENDS, str(int(number)), state]
    ended = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120)
    if state == "whole":
        assert (ended.returncode, ended.stderr) == (int(Ending.SIGNAL_CAME), "")
    else:
        assert ended.returncode == -number
        assert f"{number.name} came before this rank had another's state: it cannot join" in ended.stderr


def test_whether_a_signal_came_is_taken_over_as_it_was() -> None:
    watch = EndingWatch(RunSettings(exit_signal_handler=True))
    for came in (True, False):
        watch.restore({"elapsed_s": 1.0, "signal_came": came})
        assert watch.capture()["signal_came"] is came


def test_signals_are_left_alone_unless_asked(votes: list[int]) -> None:
    before = [signal.getsignal(number) for number in EXIT_SIGNALS]
    watch = EndingWatch(RunSettings())
    watch.start()
    assert [signal.getsignal(number) for number in EXIT_SIGNALS] == before
    assert votes == []


def test_without_signal_or_time_limit_no_message_is_sent(votes: list[int]) -> None:
    watch = EndingWatch(RunSettings(exit_interval=3))
    watch.start()
    assert [watch.agree(iteration) for iteration in (1, 2, 3)] == [
        Ending.GOES_ON,
        Ending.GOES_ON,
        Ending.INTERVAL_REACHED,
    ]
    assert votes == []


def test_the_time_limit_counts_from_the_start(votes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("megatron.training.ending.time.monotonic", lambda: now_s[0])
    watch = EndingWatch(RunSettings(exit_duration_in_mins=2))
    watch.start()
    now_s[0] += 119
    assert watch.agree(1) is Ending.GOES_ON
    now_s[0] += 2
    assert watch.agree(2) is Ending.TIME_IS_UP
    assert len(votes) == 2


def test_a_signal_counts_more_than_the_time() -> None:
    assert max(Ending) is Ending.SIGNAL_CAME
    assert len({ending.words for ending in Ending}) == len(Ending)
