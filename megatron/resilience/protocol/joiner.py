"""The joiner's half of a switch (rules P2, P6, P7): builds alone, takes the state, goes live on the lead's word.

State      Trigger   Next
BUILDING   BUILT     BUILT
BUILDING   ABORT     ENDED
BUILT      REPEAT    BUILT
BUILT      PREPARE   READY      told where the leaver rank gives its state
BUILT      ABORT     ENDED
READY      REPEAT    READY
READY      PREPARE   READY      told another address
READY      BROKE     BUILT      the leaver rank cannot be reached, or the transfer is lost for good
READY      WHOLE     WHOLE      all state is here, its checksum acknowledged
READY      STAY      ENDED
READY      ABORT     ENDED
WHOLE      LEAVE     LIVE       trains the iteration at whose top the switch is
WHOLE      STAY      ENDED
WHOLE      BROKE     DOUBT      the leaver is gone without a verdict: ask the lead
WHOLE      RESOLVE   LIVE
WHOLE      ABORT     ENDED
DOUBT      RESOLVE   LIVE
DOUBT      LEAVE     LIVE
DOUBT      STAY      ENDED
DOUBT      ABORT     ENDED
DOUBT      LATE      FAILED
LIVE       RESOLVE   LIVE
LIVE       VOTED     SETTLED    its first vote has passed: a stayer from now on
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.messages import Built, InDoubt, PrepareJoiner, Ready, Running, Unready
from megatron.resilience.protocol.switch import (
    BoundaryReached,
    BuildFinished,
    EndProcess,
    Fail,
    FetchState,
    GoLive,
    ImpossibleTransition,
    LinkAppeared,
    LinkBroke,
    PeerLost,
    RankAction,
    RankEvent,
    Report,
    StartWait,
    TransferFailed,
    TransferWhole,
    Trigger,
    VerdictCame,
    VoteClosed,
    Wait,
    WaitedTooLong,
    transition,
)


class JoinerState(enum.Enum):
    """Where a rank of a joiner stands."""

    BUILDING = "building"
    BUILT = "built"
    READY = "ready"
    WHOLE = "whole"
    DOUBT = "doubt"
    LIVE = "live"
    SETTLED = "settled"
    ENDED = "ended"
    FAILED = "failed"


_S, _T = JoinerState, Trigger
TRANSITIONS: dict[tuple[JoinerState, Trigger], JoinerState] = {
    (_S.BUILDING, _T.BUILT): _S.BUILT,
    (_S.BUILDING, _T.ABORT): _S.ENDED,
    (_S.BUILT, _T.REPEAT): _S.BUILT,
    (_S.BUILT, _T.PREPARE): _S.READY,
    (_S.BUILT, _T.ABORT): _S.ENDED,
    (_S.READY, _T.REPEAT): _S.READY,
    (_S.READY, _T.PREPARE): _S.READY,
    (_S.READY, _T.BROKE): _S.BUILT,
    (_S.READY, _T.WHOLE): _S.WHOLE,
    (_S.READY, _T.STAY): _S.ENDED,
    (_S.READY, _T.ABORT): _S.ENDED,
    (_S.WHOLE, _T.LEAVE): _S.LIVE,
    (_S.WHOLE, _T.STAY): _S.ENDED,
    (_S.WHOLE, _T.BROKE): _S.DOUBT,
    (_S.WHOLE, _T.RESOLVE): _S.LIVE,
    (_S.WHOLE, _T.ABORT): _S.ENDED,
    (_S.DOUBT, _T.RESOLVE): _S.LIVE,
    (_S.DOUBT, _T.LEAVE): _S.LIVE,
    (_S.DOUBT, _T.STAY): _S.ENDED,
    (_S.DOUBT, _T.ABORT): _S.ENDED,
    (_S.DOUBT, _T.LATE): _S.FAILED,
    (_S.LIVE, _T.RESOLVE): _S.LIVE,
    (_S.LIVE, _T.VOTED): _S.SETTLED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """The half of one rank of a joiner."""

    global_rank: int
    generation: int
    state: JoinerState = JoinerState.BUILDING
    endpoint: str = ""
    facts: Facts = field(default_factory=Facts)
    memory_bytes: int = 0
    transfer: str = ""
    iteration: int = -1
    """Of its first vote that passed."""

    @property
    def at_boundary(self) -> bool:
        """It waits, isolated: the shell must feed events until this is False."""
        return self.state in (_S.BUILT, _S.READY, _S.WHOLE, _S.DOUBT)


Step = tuple[Joiner, list[RankAction]]


def step(half: Joiner, event: RankEvent) -> Step:
    """What happens to a rank of a joiner. Events of other generations have been sorted out by `rank_core`."""
    match event:
        case BuildFinished():
            after = replace(
                _move(half, _T.BUILT), endpoint=event.endpoint, facts=event.facts, memory_bytes=event.memory_bytes
            )
            return after, [built(after)]
        case TransferWhole():
            return _move(half, _T.WHOLE), []
        case VerdictCame(leave=True):
            return _live(half, _T.LEAVE)
        case VerdictCame():
            return _end(half, _T.STAY, "the leaver stays")
        case LinkBroke(why=why) | TransferFailed(why=why):
            return _break(half, why)
        case VoteClosed(iteration=iteration):
            after = replace(_move(half, _T.VOTED), iteration=iteration)
            return after, [Report(report=Running(generation=half.generation, iteration=iteration))]
        case WaitedTooLong():
            after = _move(half, _T.LATE)
            why = f"global rank {half.global_rank}: no word whether generation {half.generation} is to go live"
            return after, [Fail(why=f"{why}; start the job again from its newest checkpoint")]
        case LinkAppeared() | PeerLost() | BoundaryReached():
            return half, []
        case _:
            raise ImpossibleTransition(f"joiner {half.global_rank}: found {event} in state {half.state.name}")


def prepare(half: Joiner, command: PrepareJoiner) -> Step:
    """Rule P2 for a joiner: it only accepts links, so it is READY once it knows where to fetch its state."""
    ready = Report(report=Ready(generation=half.generation))
    if half.state is _S.READY and command.transfer == half.transfer:
        return _move(half, _T.REPEAT), [ready]
    after = replace(_move(half, _T.PREPARE), transfer=command.transfer)
    return after, [FetchState(generation=half.generation, address=command.transfer, joiners=command.joiners), ready]


def abort(half: Joiner, why: str) -> Step:
    """The switch is over; so is this process."""
    return _end(half, _T.ABORT, why)


def resolve(half: Joiner) -> Step:
    """The controller knows from the lead that the verdict was LEAVE."""
    if half.state is _S.LIVE:
        return _move(half, _T.RESOLVE), []
    return _live(half, _T.RESOLVE)


def standing(half: Joiner) -> list[RankAction]:
    """Where it stands, for the controller."""
    if half.state is _S.BUILDING:
        return []
    if half.state is _S.DOUBT:
        return [Report(report=InDoubt(generation=half.generation))]
    known: list[RankAction] = [built(half)]
    return known if half.state is _S.BUILT else [*known, Report(report=Ready(generation=half.generation))]


def built(half: Joiner) -> Report:
    """BUILT, with what the controller compares."""
    return Report(
        report=Built(
            generation=half.generation,
            endpoint=half.endpoint,
            facts=half.facts,
            memory_bytes=half.memory_bytes,
        )
    )


def _move(half: Joiner, trigger: Trigger) -> Joiner:
    who = f"joiner, global rank {half.global_rank}, generation {half.generation}"
    return replace(half, state=transition(TRANSITIONS, half.state, trigger, who=who))


def _live(half: Joiner, trigger: Trigger) -> Step:
    return _move(half, trigger), [GoLive(generation=half.generation)]


def _end(half: Joiner, trigger: Trigger, why: str) -> Step:
    return _move(half, trigger), [EndProcess(why=f"switch of generation {half.generation}: {why}")]


def _break(half: Joiner, why: str) -> Step:
    if half.state in (_S.BUILT, _S.LIVE):  # heard twice, or after the verdict
        return half, []
    after = _move(half, _T.BROKE)
    generation = half.generation
    if after.state is _S.DOUBT:
        doubt = Report(report=InDoubt(generation=generation))
        return after, [doubt, StartWait(generation=generation, wait=Wait.DOUBT)]
    return replace(after, transfer=""), [Report(report=Unready(generation=generation, why=why))]
