"""Transitions that a table does not have raise, and say what would have been possible."""

from __future__ import annotations

import pytest

from megatron.resilience.protocol import joiner, leaver, stayer
from megatron.resilience.protocol.joiner import JoinerState
from megatron.resilience.protocol.leaver import LeaverState
from megatron.resilience.protocol.stayer import StayerState
from megatron.resilience.protocol.switch import ImpossibleTransition, Trigger, no_way_on, transition


def test_every_pair_outside_the_tables_raises() -> None:
    tried = 0
    for state in StayerState:
        for trigger in set(Trigger) - {trigger for at, trigger in stayer.TRANSITIONS if at is state}:
            tried += 1
            with pytest.raises(ImpossibleTransition, match=f"in state {state.name}"):
                transition(stayer.TRANSITIONS, state, trigger, who="x")
    assert tried > 100


def test_what_was_possible_is_said() -> None:
    with pytest.raises(ImpossibleTransition, match="x: found 'go' in state FAR, expected one of: prepare"):
        transition(stayer.TRANSITIONS, StayerState.FAR, Trigger.GO, who="x")
    with pytest.raises(ImpossibleTransition, match="nothing, it is over"):
        transition(leaver.TRANSITIONS, LeaverState.ENDED, Trigger.GO, who="x")


def test_every_trigger_and_every_state_is_used() -> None:
    tables = (stayer.TRANSITIONS, leaver.TRANSITIONS, joiner.TRANSITIONS)
    assert {trigger for table in tables for _, trigger in table} == set(Trigger)
    assert {at for at, _ in stayer.TRANSITIONS} | set(stayer.TRANSITIONS.values()) == set(StayerState)
    assert {at for at, _ in leaver.TRANSITIONS} | set(leaver.TRANSITIONS.values()) == set(LeaverState)
    assert {at for at, _ in joiner.TRANSITIONS} | set(joiner.TRANSITIONS.values()) == set(JoinerState)


def test_an_error_says_who_what_and_what_to_do() -> None:
    why = no_way_on(3, 2, "the lead is gone").why
    assert "global rank 3" in why
    assert "generation 2: the lead is gone" in why
    assert "start it again" in why
