"""The stayer's half of a switch (rules P2, P5, P6). Every rank that neither leaves nor joins is one; most stay FAR.

State      Trigger   Next
FAR        PREPARE   PREPARING  build a link beside each live one to a rank that leaves
PREPARING  PREPARE   PREPARING  more leaver ranks, or asked again
PREPARING  LINKED    PREPARING
PREPARING  PREPARED  READY
PREPARING  BROKE     UNREADY
PREPARING  ABORT     FAR
READY      PREPARE   PREPARING  more leaver ranks
READY      REPEAT    READY      asked again: say READY again
READY      LINKED    PREPARING  another live link to a rank that leaves
READY      PREPARED  READY
READY      BROKE     UNREADY
READY      ABORT     FAR
READY      GRANT     GRANTED    the vote has granted the switch
UNREADY    PREPARE   PREPARING  try again
UNREADY    PREPARED  UNREADY
UNREADY    LINKED    UNREADY
UNREADY    BROKE     UNREADY
UNREADY    ABORT     FAR
GRANTED    LINKED    GRANTED
GRANTED    PREPARED  GRANTED    asked for twice, and READY at the first
GRANTED    BROKE     GRANTED    connects when first used
GRANTED    BOUNDARY  AWAITING   wait for the verdicts of the leaver ranks, driving progress
AWAITING   LINKED    AWAITING
AWAITING   PREPARED  AWAITING
AWAITING   BROKE     AWAITING
AWAITING   VERDICT   AWAITING   not all have spoken
AWAITING   LEAVE     FAR        commit
AWAITING   STAY      FAR        drop what was prepared
AWAITING   LOST      FAILED     a leaver is gone without a verdict
AWAITING   LATE      FAILED

PREPARING and UNREADY veto, and nothing moves a rank between its vote and the result (`rank_core`), so GRANT is
impossible there.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron.resilience.protocol.messages import NoteVerdict, PrepareStayer, Ready, Unready
from megatron.resilience.protocol.switch import (
    AbortLinks,
    BoundaryReached,
    CommitLinks,
    ImpossibleTransition,
    LinkAppeared,
    LinkBroke,
    LinksPrepared,
    NoteCame,
    PeerLost,
    PrepareLinks,
    RankAction,
    RankEvent,
    Report,
    StartWait,
    Trigger,
    Wait,
    WaitedTooLong,
    check_boundary,
    no_way_on,
    transition,
)


class StayerState(enum.Enum):
    """Where a stayer stands."""

    FAR = "far"
    PREPARING = "preparing"
    READY = "ready"
    UNREADY = "unready"
    GRANTED = "granted"
    AWAITING = "awaiting"
    FAILED = "failed"


_S, _T = StayerState, Trigger
TRANSITIONS: dict[tuple[StayerState, Trigger], StayerState] = {
    (_S.FAR, _T.PREPARE): _S.PREPARING,
    (_S.PREPARING, _T.PREPARE): _S.PREPARING,
    (_S.PREPARING, _T.LINKED): _S.PREPARING,
    (_S.PREPARING, _T.PREPARED): _S.READY,
    (_S.PREPARING, _T.BROKE): _S.UNREADY,
    (_S.PREPARING, _T.ABORT): _S.FAR,
    (_S.READY, _T.PREPARE): _S.PREPARING,
    (_S.READY, _T.REPEAT): _S.READY,
    (_S.READY, _T.LINKED): _S.PREPARING,
    (_S.READY, _T.PREPARED): _S.READY,
    (_S.READY, _T.BROKE): _S.UNREADY,
    (_S.READY, _T.ABORT): _S.FAR,
    (_S.READY, _T.GRANT): _S.GRANTED,
    (_S.UNREADY, _T.PREPARE): _S.PREPARING,
    (_S.UNREADY, _T.PREPARED): _S.UNREADY,
    (_S.UNREADY, _T.LINKED): _S.UNREADY,
    (_S.UNREADY, _T.BROKE): _S.UNREADY,
    (_S.UNREADY, _T.ABORT): _S.FAR,
    (_S.GRANTED, _T.LINKED): _S.GRANTED,
    (_S.GRANTED, _T.PREPARED): _S.GRANTED,
    (_S.GRANTED, _T.BROKE): _S.GRANTED,
    (_S.GRANTED, _T.BOUNDARY): _S.AWAITING,
    (_S.AWAITING, _T.LINKED): _S.AWAITING,
    (_S.AWAITING, _T.PREPARED): _S.AWAITING,
    (_S.AWAITING, _T.BROKE): _S.AWAITING,
    (_S.AWAITING, _T.VERDICT): _S.AWAITING,
    (_S.AWAITING, _T.LEAVE): _S.FAR,
    (_S.AWAITING, _T.STAY): _S.FAR,
    (_S.AWAITING, _T.LOST): _S.FAILED,
    (_S.AWAITING, _T.LATE): _S.FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stayer:
    """A stayer's half: its state and what it must remember."""

    global_rank: int
    state: StayerState = StayerState.FAR
    generation: int = 0
    """Of the switch under way; 0 when FAR."""
    joiners: Mapping[int, str] = field(default_factory=dict)
    """All ranks that leave, and where their joiners listen."""
    linked: frozenset[int] = frozenset()
    """Those of them whose verdict it waits for."""
    boundary: int = -1
    why: str = ""
    verdicts: Mapping[int, bool] = field(default_factory=dict)

    @property
    def at_boundary(self) -> bool:
        """It waits: the shell must feed events until this is False."""
        return self.state is StayerState.AWAITING


Step = tuple[Stayer, list[RankAction]]


def obstacles(half: Stayer) -> tuple[str, ...]:
    """Why this rank vetoes a switch now (rule P4): it was asked to prepare, and is not READY."""
    if half.state is StayerState.PREPARING:
        return (f"links of generation {half.generation} are being prepared",)
    if half.state is StayerState.UNREADY:
        return (f"generation {half.generation}: {half.why}",)
    return ()


def step(half: Stayer, event: RankEvent) -> Step:
    """What happens to a stayer in a switch. Events of other generations have been sorted out by `rank_core`."""
    match event:
        case LinksPrepared():
            after = _move(half, Trigger.PREPARED)
            became_ready = after.state is StayerState.READY and half.state is not StayerState.READY
            return after, [ready(after)] if became_ready else []
        case LinkBroke(why=why):
            after = replace(_move(half, Trigger.BROKE), why=why)
            said = after.state is StayerState.UNREADY
            return after, [Report(report=Unready(generation=half.generation, why=why))] if said else []
        case LinkAppeared(peer=peer) if peer in half.joiners and half.state is not StayerState.FAR:
            after = _move(half, Trigger.LINKED)
            again = after.state is StayerState.PREPARING
            return after, [PrepareLinks(generation=half.generation, joiners=half.joiners)] if again else []
        case LinkAppeared():
            return half, []
        case BoundaryReached(iteration=iteration) if half.state is StayerState.GRANTED:
            return _reach(half, iteration)
        case BoundaryReached():
            return half, []
        case NoteCame(sender=sender, note=NoteVerdict(leave=leave)):
            return _settle(replace(half, verdicts={**half.verdicts, sender: leave}))
        case PeerLost(global_rank=peer):
            lost = half.at_boundary and peer in half.linked and peer not in half.verdicts
            return _fail(half, Trigger.LOST, f"global rank {peer} is gone without a verdict") if lost else (half, [])
        case WaitedTooLong():
            absent = sorted(half.linked - set(half.verdicts))
            return _fail(half, Trigger.LATE, f"no verdict in time from global ranks {absent}")
        case _:
            raise ImpossibleTransition(f"stayer {half.global_rank}: found {event} in state {half.state.name}")


def prepare(half: Stayer, command: PrepareStayer) -> Step:
    """Rule P2. Repeated, it is answered again; more leaver ranks may be linked than before."""
    repeated = half.generation == command.generation
    linked = frozenset(command.linked) | (half.linked if repeated else frozenset())
    joiners = half.joiners if repeated else dict(command.joiners)
    if half.state is StayerState.READY and linked == half.linked:
        return _move(half, Trigger.REPEAT), [ready(half)]
    after = replace(_move(half, Trigger.PREPARE), generation=command.generation, joiners=joiners, linked=linked, why="")
    return after, [PrepareLinks(generation=command.generation, joiners=joiners)]


def abort(half: Stayer) -> Step:
    """Drop what was prepared; the live links were never touched."""
    _move(half, Trigger.ABORT)
    return Stayer(global_rank=half.global_rank), [AbortLinks(generation=half.generation)]


def grant(half: Stayer, boundary: int) -> Step:
    """The vote has granted this generation; rule P5 names the boundary."""
    return replace(_move(half, Trigger.GRANT), boundary=boundary), []


def ready(half: Stayer) -> Report:
    """READY, with the leaver ranks whose verdict it waits for."""
    return Report(report=Ready(generation=half.generation, linked=tuple(sorted(half.linked))))


def _move(half: Stayer, trigger: Trigger) -> Stayer:
    who = f"stayer, global rank {half.global_rank}, generation {half.generation}"
    return replace(half, state=transition(TRANSITIONS, half.state, trigger, who=who))


def _reach(half: Stayer, iteration: int) -> Step:
    check_boundary(half.global_rank, iteration, half.boundary)
    waiting = StartWait(generation=half.generation, wait=Wait.LEAVER_VERDICT)
    after, actions = _settle(_move(half, Trigger.BOUNDARY))
    return after, [waiting, *actions] if after.at_boundary else actions


def _settle(half: Stayer) -> Step:
    """Acts on the verdicts once the boundary is reached and all have come; early ones wait in `verdicts`."""
    if not half.at_boundary:
        return half, []
    if not half.linked <= set(half.verdicts):
        return _move(half, Trigger.VERDICT) if half.verdicts else half, []
    spoken = {half.verdicts[leaver] for leaver in half.linked}
    if len(spoken) != 1:
        raise ImpossibleTransition(f"stayer {half.global_rank}: verdicts differ: {dict(half.verdicts)}")
    far = Stayer(global_rank=half.global_rank)
    if spoken == {True}:
        _move(half, Trigger.LEAVE)
        return far, [CommitLinks(generation=half.generation, joiners=half.joiners)]
    _move(half, Trigger.STAY)
    return far, [AbortLinks(generation=half.generation)]


def _fail(half: Stayer, trigger: Trigger, why: str) -> Step:
    after = replace(_move(half, trigger), why=why)
    return after, [no_way_on(half.global_rank, half.generation, why)]
