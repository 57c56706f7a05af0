"""How a job, and on each machine its part, comes to an end: one table, used by the launcher and by the spawner.

State      Event             Next
RUNNING    RANK_FAILED       SETTLING   peers get a moment to fail by themselves, so that all causes are known
RUNNING    STOP_REQUESTED    STOPPING   a signal was forwarded; ranks write a checkpoint and exit
RUNNING    KILL_REQUESTED    KILLING
RUNNING    ALL_ENDED         ENDED
SETTLING   RANK_FAILED       SETTLING
SETTLING   STOP_REQUESTED    KILLING    with a rank gone nobody can write a checkpoint
SETTLING   KILL_REQUESTED    KILLING
SETTLING   DEADLINE_PASSED   KILLING
SETTLING   ALL_ENDED         ENDED
STOPPING   RANK_FAILED       SETTLING
STOPPING   STOP_REQUESTED    STOPPING
STOPPING   KILL_REQUESTED    KILLING
STOPPING   DEADLINE_PASSED   KILLING
STOPPING   ALL_ENDED         ENDED
KILLING    RANK_FAILED       KILLING
KILLING    STOP_REQUESTED    KILLING
KILLING    KILL_REQUESTED    KILLING
KILLING    DEADLINE_PASSED   ENDED      something can't be killed: it is named, and not waited for
KILLING    ALL_ENDED         ENDED

The shells keep the deadline of the present state and do what the new state asks; nothing here reads a clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.Enum):
    """Where the job stands."""

    RUNNING = "running"
    SETTLING = "settling"
    STOPPING = "stopping"
    KILLING = "killing"
    ENDED = "ended"


class Event(enum.Enum):
    """What happened to it."""

    RANK_FAILED = "rank failed"
    STOP_REQUESTED = "stop requested"
    KILL_REQUESTED = "kill requested"
    DEADLINE_PASSED = "deadline passed"
    ALL_ENDED = "all ended"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.RUNNING, Event.RANK_FAILED): State.SETTLING,
    (State.RUNNING, Event.STOP_REQUESTED): State.STOPPING,
    (State.RUNNING, Event.KILL_REQUESTED): State.KILLING,
    (State.RUNNING, Event.ALL_ENDED): State.ENDED,
    (State.SETTLING, Event.RANK_FAILED): State.SETTLING,
    (State.SETTLING, Event.STOP_REQUESTED): State.KILLING,
    (State.SETTLING, Event.KILL_REQUESTED): State.KILLING,
    (State.SETTLING, Event.DEADLINE_PASSED): State.KILLING,
    (State.SETTLING, Event.ALL_ENDED): State.ENDED,
    (State.STOPPING, Event.RANK_FAILED): State.SETTLING,
    (State.STOPPING, Event.STOP_REQUESTED): State.STOPPING,
    (State.STOPPING, Event.KILL_REQUESTED): State.KILLING,
    (State.STOPPING, Event.DEADLINE_PASSED): State.KILLING,
    (State.STOPPING, Event.ALL_ENDED): State.ENDED,
    (State.KILLING, Event.RANK_FAILED): State.KILLING,
    (State.KILLING, Event.STOP_REQUESTED): State.KILLING,
    (State.KILLING, Event.KILL_REQUESTED): State.KILLING,
    (State.KILLING, Event.DEADLINE_PASSED): State.ENDED,
    (State.KILLING, Event.ALL_ENDED): State.ENDED,
}


class ImpossibleTransition(Exception):  # noqa: N818 - a defect of ours, named for what happened
    """An event came in a state that can't have it."""


def transition(state: State, event: Event) -> State:
    """The state after `event`. Raises ImpossibleTransition for a pair that the table doesn't have."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ImpossibleTransition(f"found event '{event.value}' in state '{state.value}'") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long each state may last, in seconds."""

    settle_s: float = 2.0
    """From the first failure until the remaining ranks are killed."""
    grace_s: float = 60.0
    """From a forwarded signal until the remaining ranks are killed."""
    kill_s: float = 3.0
    """From the kill until nothing is waited for any more."""

    def of(self, state: State) -> float | None:
        """Seconds that `state` may last; None where there is no limit."""
        return {State.SETTLING: self.settle_s, State.STOPPING: self.grace_s, State.KILLING: self.kill_s}.get(state)
