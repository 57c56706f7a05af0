"""The words of a switch on the rank's side: what happens to a rank (events) and what it is asked to do (actions).

The halves are `stayer.py`, `leaver.py` (with the lead) and `joiner.py`: an enum, a table and `step` each, pure.
`rank_core.py` holds the one that a rank is in. The shell feeds events in, in the order in which they happened, and
carries each list of actions out in its order.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.messages import Directory, Note, RankCommand, RankReport
from megatron.resilience.protocol.vote import Contribution


class ImpossibleTransition(Exception):  # noqa: N818 - a defect of ours, named for what happened
    """An event came in a state that can't have it."""


class Trigger(enum.Enum):
    """What moves a half from state to state; what an event amounts to once its data have been looked at."""

    PREPARE = "prepare"
    REPEAT = "repeat"
    PREPARED = "prepared"
    LINKED = "linked"
    BROKE = "broke"
    ABORT = "abort"
    GO = "go"
    WITHDRAW = "withdraw"
    OPEN = "open"
    VETO = "veto"
    GRANT = "grant"
    BOUNDARY = "boundary"
    ACKED = "acked"
    VERDICT = "verdict"
    LEAVE = "leave"
    STAY = "stay"
    LOST = "lost"
    LATE = "late"
    RELEASE = "release"
    BUILT = "built"
    WHOLE = "whole"
    RESOLVE = "resolve"
    VOTED = "voted"


State = TypeVar("State", bound=enum.Enum)


def transition(table: Mapping[tuple[State, Trigger], State], state: State, trigger: Trigger, *, who: str) -> State:
    """The state after `trigger`. Raises ImpossibleTransition for a pair that the table doesn't have."""
    try:
        return table[state, trigger]
    except KeyError:
        possible = ", ".join(sorted(event.value for at, event in table if at is state)) or "nothing, it is over"
        raise ImpossibleTransition(
            f"{who}: found '{trigger.value}' in state {state.name}, expected one of: {possible}"
        ) from None


def rows(state: State, **after: State) -> dict[tuple[State, Trigger], State]:
    """Rows of a table that begin in `state`: names of triggers to what follows."""
    return {(state, Trigger[name]): following for name, following in after.items()}


def check_boundary(global_rank: int, iteration: int, boundary: int) -> None:
    """Rule P5: raises unless a granted rank stands at the boundary of all."""
    if iteration != boundary:
        raise ImpossibleTransition(
            f"global rank {global_rank}: at the top of iteration {iteration}, expected boundary {boundary}"
        )


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandCame:
    """The controller said something, by way of the agent."""

    command: RankCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteCame:
    """Another rank said something."""

    sender: int
    note: Note


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksPrepared:
    """Every link that was asked for stands."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBroke:
    """A prepared link broke, or cannot be made; to the joiner: it cannot reach its leaver's transfer."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAppeared:
    """A live link to `peer` has come up (it was used for the first time)."""

    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferListening:
    """Leaver: its state can be fetched at `address`."""

    generation: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteOpened:
    """The rank is about to vote. `obstacles`: a save not finalised, the last iteration; `exits`: why to end, or 0."""

    iteration: int
    obstacles: tuple[str, ...] = ()
    exits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteClosed:
    """The result of the vote of `iteration`."""

    iteration: int
    result: Contribution


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryReached:
    """The rank stands at the top of `iteration`: evaluation and save are done. Said in every iteration."""

    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferAcked:
    """Leaver: its joiner rank has acknowledged the checksum of all."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailed:
    """Leaver: the transfer is lost for good. Joiner: its leaver is."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferWhole:
    """Joiner: all state has come and its checksum is right; it has been acknowledged."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictCame:
    """Joiner: the last frame of the transfer."""

    generation: int
    leave: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """A rank that is waited for is gone."""

    global_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitedTooLong:
    """The limit of the present wait (StartWait) has passed."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFinished:
    """Joiner: all is built, alone."""

    endpoint: str
    facts: Facts
    memory_bytes: int


RankEvent = (
    CommandCame
    | NoteCame
    | LinksPrepared
    | LinkBroke
    | LinkAppeared
    | TransferListening
    | VoteOpened
    | VoteClosed
    | BoundaryReached
    | TransferAcked
    | TransferFailed
    | TransferWhole
    | VerdictCame
    | PeerLost
    | WaitedTooLong
    | BuildFinished
)


# ------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tell the controller, by way of the agent."""

    report: RankReport


@dataclass(frozen=True, slots=True, kw_only=True)
class SendNote:
    """Tell another rank."""

    peer: int
    note: Note


@dataclass(frozen=True, slots=True, kw_only=True)
class SendVerdict:
    """Leaver: the last frame of the transfer; then close it."""

    generation: int
    leave: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareLinks:
    """Dial these joiner endpoints in the background for every live link to their leavers; LinksPrepared or LinkBroke
    follows. Given again, in one generation always for the same joiners, it is answered again.
    """

    generation: int
    joiners: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLinks:
    """Make prepared links live."""

    generation: int
    joiners: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortLinks:
    """Drop prepared links."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenForTransfer:
    """Leaver: TransferListening follows, or LinkBroke."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseTransfer:
    """Leaver: stop listening or sending, without a verdict."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldNewLinks:
    """Leaver at the boundary: callers of new links are told to try again until the verdict (then: that it moved)."""

    generation: int
    hold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SendState:
    """Leaver: give the state; TransferAcked or TransferFailed follows."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchState:
    """Joiner: connect to `address` and take what comes; TransferWhole, then VerdictCame follow, or LinkBroke."""

    generation: int
    address: str
    joiners: Mapping[int, str]
    """Endpoints of all ranks that join in this switch, its own among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribute:
    """Vote with this."""

    contribution: Contribution


class Wait(enum.Enum):
    """The bounded waits of a switch; the shell has the limits. The lead's must be the shortest."""

    LEAD_DECIDES = "the lead waits for all acknowledgements"
    LEAD_VERDICT = "a leaver rank waits for the lead"
    LEAVER_VERDICT = "a linked stayer waits for its leavers"
    DOUBT = "a joiner waits for word of the lead"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWait:
    """WaitedTooLong follows unless the half has moved on; a later StartWait replaces it."""

    generation: int
    wait: Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class GoLive:
    """Joiner: leave isolation and train the present iteration in `generation`."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateDirectory:
    """New endpoints and slot generations."""

    directory: Directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Raise: the rank cannot go on. Until recovery exists, the job ends with this error."""

    why: str


def no_way_on(global_rank: int, generation: int, why: str) -> Fail:
    """What a rank says that waits for a verdict in vain."""
    return Fail(
        why=f"global rank {global_rank}, switch of generation {generation}: {why}; the job cannot go on without it, "
        "start it again from its newest checkpoint"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProcess:
    """Leave with exit code 0: the slot has moved, or the switch that this joiner was made for is over."""

    why: str


RankAction = (
    Report
    | SendNote
    | SendVerdict
    | PrepareLinks
    | CommitLinks
    | AbortLinks
    | ListenForTransfer
    | CloseTransfer
    | HoldNewLinks
    | SendState
    | FetchState
    | Contribute
    | StartWait
    | GoLive
    | UpdateDirectory
    | Fail
    | EndProcess
)
