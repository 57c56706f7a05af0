"""The table of states: as drawn in the module's docstring, and with an end from everywhere."""

from __future__ import annotations

import re

import pytest

from megatron.resilience.agent import lifecycle
from megatron.resilience.agent.lifecycle import TRANSITIONS, Event, ImpossibleTransition, Limits, State, transition


def test_table_is_the_one_drawn_in_the_docstring() -> None:
    rows = re.findall(r"^([A-Z]+) +([A-Z]+_[A-Z]+) +([A-Z]+)\b", lifecycle.__doc__ or "", re.MULTILINE)
    assert {(State[state], Event[event]): State[after] for state, event, after in rows} == TRANSITIONS
    assert len(rows) == len(TRANSITIONS)


def test_every_state_with_a_limit_leaves_when_it_has_passed() -> None:
    limits = Limits()
    for state in State:
        has_exit = (state, Event.DEADLINE_PASSED) in TRANSITIONS
        assert has_exit == (limits.of(state) is not None)
        assert not has_exit or TRANSITIONS[state, Event.DEADLINE_PASSED] is not state


def test_every_living_state_ends_when_all_have_ended_and_none_goes_back_to_running() -> None:
    for state in set(State) - {State.ENDED}:
        assert transition(state, Event.ALL_ENDED) is State.ENDED
    assert State.RUNNING not in TRANSITIONS.values()


@pytest.mark.parametrize("event", Event)
def test_nothing_happens_after_the_end(event: Event) -> None:
    with pytest.raises(ImpossibleTransition, match="ended"):
        transition(State.ENDED, event)


def test_running_has_no_deadline() -> None:
    with pytest.raises(ImpossibleTransition):
        transition(State.RUNNING, Event.DEADLINE_PASSED)
