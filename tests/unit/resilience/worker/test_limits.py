"""Whoever waits for a verdict outlasts whoever gives it, and a bigger state gets more time."""

from __future__ import annotations

import pytest

from megatron.resilience.protocol.controller_words import Limits
from megatron.resilience.protocol.switch import Wait
from megatron.resilience.worker.limits import SwitchLimits

COLLECTIVE_S = (1.0, 60.0, 600.0, 1800.0, 86400.0)


@pytest.mark.parametrize("collective_s", COLLECTIVE_S)
def test_each_wait_outlasts_what_it_waits_for(collective_s: float) -> None:
    limits = SwitchLimits.within(collective_s)
    order = [limits.of(wait) for wait in (Wait.LEAD_DECIDES, Wait.LEAD_VERDICT, Wait.LEAVER_VERDICT, Wait.DOUBT)]
    assert order == sorted(set(order))
    assert {limits.of(wait) for wait in Wait} == set(order), "every wait has a limit"
    assert all(limits.of_state(size) <= limits.of(Wait.LEAD_DECIDES) for size in (0, 10**9, 10**15))


@pytest.mark.parametrize("collective_s", COLLECTIVE_S)
def test_the_controller_outlasts_a_joiner_in_doubt(collective_s: float) -> None:
    assert Limits().running_ms > SwitchLimits.within(collective_s).of(Wait.DOUBT) * 1000


def test_a_state_gets_time_by_its_size_as_far_as_collectives_wait() -> None:
    limits = SwitchLimits.within(600.0)
    assert limits == SwitchLimits()
    assert limits.of_state(10**6) == 120.0
    assert limits.of_state(30 * 10**9) == pytest.approx(300.0)
    assert limits.of_state(10**13) == 540.0
    assert limits.of(Wait.LEAVER_VERDICT) < 600.0
    assert SwitchLimits.within(3600.0).of_state(75 * 10**9) == pytest.approx(750.0)
