"""Whoever waits for a verdict outlasts whoever gives it."""

from __future__ import annotations

from megatron.resilience.protocol.controller_words import Limits
from megatron.resilience.protocol.switch import Wait
from megatron.resilience.worker.limits import SwitchLimits


def test_each_wait_outlasts_what_it_waits_for() -> None:
    limits = SwitchLimits()
    order = [limits.of(wait) for wait in (Wait.LEAD_DECIDES, Wait.LEAD_VERDICT, Wait.LEAVER_VERDICT, Wait.DOUBT)]
    assert order == sorted(set(order))
    assert {limits.of(wait) for wait in Wait} == set(order), "every wait has a limit"


def test_the_controller_outlasts_a_joiner_in_doubt() -> None:
    assert Limits().running_ms > SwitchLimits().doubt_s * 1000
