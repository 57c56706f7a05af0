"""Which signals a process is to live through."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from megatron.resilience.agent.signals import is_ignored


@pytest.fixture(params=[signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


def test_hang_up_alone_may_be_ignored_by_inheritance(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    assert not is_ignored(number)
    signal.signal(number, signal.SIG_IGN)
    assert is_ignored(number) == (number == signal.SIGHUP)
