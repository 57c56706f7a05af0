"""The leaver's half of a switch, and the lead's, who casts and decides (rules P3, P4, P6, P7).

State        Trigger   Next
LISTENING    REPEAT    LISTENING
LISTENING    GO        LISTENING    it was READY before, and will be told again when it is
LISTENING    PREPARED  READY        the address of the transfer is known
LISTENING    ABORT     OVER
LISTENING    WITHDRAW  OVER         lead
LISTENING    BROKE     UNREADY
READY        REPEAT    READY
READY        GO        ARMED        lead: all are READY
READY        ABORT     OVER
READY        WITHDRAW  OVER         lead
READY        BROKE     UNREADY
READY        GRANT     GRANTED      not the lead: the vote has granted the switch
ARMED        REPEAT    ARMED
ARMED        GO        ARMED
ARMED        OPEN      CASTING      the generation goes into the vote
ARMED        WITHDRAW  OVER
ARMED        BROKE     UNREADY
UNREADY      REPEAT    LISTENING    try again
UNREADY      GO        UNREADY      it went out before the break was heard of
UNREADY      ABORT     OVER
UNREADY      WITHDRAW  OVER
UNREADY      BROKE     UNREADY
CASTING      VETO      ARMED        cast again
CASTING      GRANT     GRANTED
GRANTED      REPEAT    GRANTED
GRANTED      GO        GRANTED
GRANTED      WITHDRAW  GRANTED      answered with Cast; the verdict will be STAY
GRANTED      BROKE     GRANTED
GRANTED      STAY      OVER         the lead was there first, and had heard of a failure
GRANTED      BOUNDARY  SENDING      hold new links, give the state
SENDING      ACKED     ACKED        the joiner rank has it whole
SENDING      BROKE     STRANDED     not the lead: tell the lead, whose verdict will be STAY
SENDING      STAY      OVER
SENDING      LOST      FAILED       not the lead: which is gone, or gives no verdict in time
ACKED        BROKE     STRANDED     not the lead
ACKED        LEAVE     LEFT         all acknowledged: the point of no return
ACKED        STAY      OVER
ACKED        LOST      FAILED
STRANDED     LEAVE     LEFT         the lead had decided before it heard; the joiner asks
STRANDED     STAY      OVER
STRANDED     LOST      FAILED
LEFT         BROKE     LEFT
LEFT         LOST      LEFT
LEFT         RELEASE   ENDED        process and state are kept until here

LISTENING and UNREADY veto, and nothing moves a rank between its vote and the result (`rank_core`), so GRANT is
impossible there. OVER: the rank is a stayer again, as if nothing had been.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from megatron.resilience.protocol.messages import (
    Armed,
    AtBoundary,
    Cast,
    Left,
    MoreLinks,
    NoteAcked,
    NoteFailed,
    NoteVerdict,
    Ready,
    Stayed,
    Unready,
    Withdrawn,
)
from megatron.resilience.protocol.switch import (
    BoundaryReached,
    CloseTransfer,
    EndProcess,
    HoldNewLinks,
    ImpossibleTransition,
    LinkAppeared,
    LinkBroke,
    ListenForTransfer,
    NoteCame,
    PeerLost,
    RankAction,
    RankEvent,
    Report,
    SendNote,
    SendState,
    SendVerdict,
    StartWait,
    TransferAcked,
    TransferFailed,
    TransferListening,
    Trigger,
    Wait,
    WaitedTooLong,
    check_boundary,
    no_way_on,
    rows,
    transition,
)


class LeaverState(enum.Enum):
    """Where a rank of a leaver stands."""

    LISTENING = "listening"
    READY = "ready"
    UNREADY = "unready"
    ARMED = "armed"
    CASTING = "casting"
    GRANTED = "granted"
    SENDING = "sending"
    ACKED = "acked"
    STRANDED = "stranded"
    LEFT = "left"
    OVER = "over"
    ENDED = "ended"
    FAILED = "failed"


_S, _T = LeaverState, Trigger
TRANSITIONS: dict[tuple[LeaverState, Trigger], LeaverState] = {
    **rows(_S.LISTENING, REPEAT=_S.LISTENING, GO=_S.LISTENING, PREPARED=_S.READY, ABORT=_S.OVER),
    **rows(_S.LISTENING, WITHDRAW=_S.OVER, BROKE=_S.UNREADY),
    **rows(_S.READY, REPEAT=_S.READY, GO=_S.ARMED, ABORT=_S.OVER, WITHDRAW=_S.OVER, BROKE=_S.UNREADY),
    **rows(_S.READY, GRANT=_S.GRANTED),
    **rows(_S.ARMED, REPEAT=_S.ARMED, GO=_S.ARMED, OPEN=_S.CASTING, WITHDRAW=_S.OVER, BROKE=_S.UNREADY),
    **rows(_S.UNREADY, REPEAT=_S.LISTENING, GO=_S.UNREADY, ABORT=_S.OVER, WITHDRAW=_S.OVER, BROKE=_S.UNREADY),
    **rows(_S.CASTING, VETO=_S.ARMED, GRANT=_S.GRANTED),
    **rows(_S.GRANTED, REPEAT=_S.GRANTED, GO=_S.GRANTED, WITHDRAW=_S.GRANTED, BROKE=_S.GRANTED, STAY=_S.OVER),
    **rows(_S.GRANTED, BOUNDARY=_S.SENDING),
    **rows(_S.SENDING, ACKED=_S.ACKED, BROKE=_S.STRANDED, STAY=_S.OVER, LOST=_S.FAILED),
    **rows(_S.ACKED, BROKE=_S.STRANDED, LEAVE=_S.LEFT, STAY=_S.OVER, LOST=_S.FAILED),
    **rows(_S.STRANDED, LEAVE=_S.LEFT, STAY=_S.OVER, LOST=_S.FAILED),
    **rows(_S.LEFT, BROKE=_S.LEFT, LOST=_S.LEFT, RELEASE=_S.ENDED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaver:
    """The half of one rank of a leaver."""

    global_rank: int
    generation: int
    leavers: frozenset[int]
    """All ranks that leave in this switch."""
    lead: int
    state: LeaverState = LeaverState.LISTENING
    linked: frozenset[int] = frozenset()
    """Stayers that it has live links to."""
    planned: frozenset[int] = frozenset()
    """Stayers that are prepared, and will wait for its verdict."""
    transfer: str = ""
    boundary: int = -1
    acked: frozenset[int] = frozenset()
    """Lead: leaver ranks whose joiners hold whole state."""
    failed: str = ""
    """Why this rank cannot give its state; at the lead, why the verdict must be STAY. May come before the boundary."""
    lacking: frozenset[int] = frozenset()
    """Lead: leaver ranks whose joiners did not take their state."""

    @property
    def is_lead(self) -> bool:
        """It casts and decides."""
        return self.global_rank == self.lead

    @property
    def at_boundary(self) -> bool:
        """It waits: the shell must feed events until this is False. Leaving the job ends the wait too."""
        return self.state in (_S.SENDING, _S.ACKED, _S.STRANDED, _S.LEFT)


Step = tuple[Leaver, list[RankAction]]


def start(global_rank: int, generation: int, leavers: frozenset[int], lead: int, linked: frozenset[int]) -> Step:
    """Rule P2 for a leaver: listen, then READY with the ranks it has live links to."""
    half = Leaver(global_rank=global_rank, generation=generation, leavers=leavers, lead=lead, linked=linked - leavers)
    return half, [ListenForTransfer(generation=generation)]


def obstacles(half: Leaver) -> tuple[str, ...]:
    """Why this rank vetoes a switch now (rule P4)."""
    if half.state is _S.LISTENING:
        return (f"generation {half.generation}: nowhere to give the state yet",)
    if half.state is _S.UNREADY:
        return (f"generation {half.generation}: {half.failed}",)
    if unplanned(half) and half.state in (_S.READY, _S.ARMED, _S.CASTING):
        return (f"generation {half.generation}: live links to global ranks {unplanned(half)}, which are not prepared",)
    return ()


def unplanned(half: Leaver) -> list[int]:
    """Stayers with a live link to this rank that are not known to be READY and to wait for its verdict (rule P2)."""
    return sorted(half.linked - half.planned)


def casts(half: Leaver) -> int:
    """The generation that goes into the vote, or 0: only the lead casts, and only after GO (rule P3)."""
    return half.generation if half.is_lead and half.state is _S.CASTING else 0


def may_leave(half: Leaver) -> bool:
    """Rule P6: the lead decides LEAVE only when every leaver rank's joiner has acknowledged whole state."""
    return half.acked >= half.leavers


def verdict_of(half: Leaver) -> bool | None:
    """The lead's verdict: LEAVE, STAY, or None while it is open. A failure or a time-out means STAY."""
    if half.failed:
        return False
    return True if half.state is _S.ACKED and may_leave(half) else None


def step(half: Leaver, event: RankEvent) -> Step:
    """What happens to a rank of a leaver. Events of other generations have been sorted out by `rank_core`."""
    match event:
        case TransferListening(address=address):
            after = replace(_move(half, _T.PREPARED), transfer=address, planned=half.linked)
            return after, standing(after)
        case LinkAppeared(peer=peer):
            return _see_link(half, peer)
        case BoundaryReached(iteration=iteration):
            return _reach(half, iteration) if half.state is _S.GRANTED else (half, [])
        case TransferAcked():
            after = _move(half, _T.ACKED)
            if half.is_lead:
                return _decide(replace(after, acked=after.acked | {half.global_rank}))
            return after, [SendNote(peer=half.lead, note=NoteAcked(generation=half.generation))]
        case NoteCame(sender=sender, note=NoteAcked()):
            return _decide(replace(half, acked=half.acked | {sender}))
        case NoteCame(sender=sender, note=NoteFailed(why=why)):
            why = half.failed or f"global rank {sender}: {why}"
            return _decide(replace(half, failed=why, lacking=half.lacking | {sender}))
        case NoteCame(note=NoteVerdict(leave=leave)):
            return _obey(half, leave)
        case TransferFailed(why=why) | LinkBroke(why=why):
            return _break(half, why)
        case PeerLost(global_rank=peer):
            return _lose(half, "the lead is gone") if peer == half.lead and half.at_boundary else (half, [])
        case WaitedTooLong() if half.is_lead:
            late = half.lacking | (half.leavers - half.acked)
            return _decide(replace(half, failed=half.failed or "not all acknowledged in time", lacking=late))
        case WaitedTooLong():
            return _lose(half, "the lead gave no verdict in time")
        case _:
            raise ImpossibleTransition(f"leaver {half.global_rank}: found {event} in state {half.state.name}")


def repeat(half: Leaver) -> Step:
    """PREPARE again: say where it stands again."""
    after = _move(half, _T.REPEAT)
    if half.state is _S.UNREADY:
        return replace(after, failed=""), [ListenForTransfer(generation=half.generation)]
    return after, standing(half)


def go(half: Leaver) -> Step:
    """GO of the controller, to the lead."""
    return (after := _move(half, _T.GO)), standing(after)


def withdraw(half: Leaver) -> Step:
    """Rule P3: what the lead has not cast it gives up; what has been granted and not decided ends with STAY."""
    failed = half.failed or "the controller gave it up"
    if half.at_boundary:
        return _decide(replace(half, failed=failed))
    after = _move(half, _T.WITHDRAW)
    if after.state is _S.OVER:
        return after, [CloseTransfer(generation=half.generation), Report(report=Withdrawn(generation=half.generation))]
    return replace(after, failed=failed), standing(after)


def abort(half: Leaver) -> Step:
    """The controller aborts, which it may only before GO or after Withdrawn."""
    return _move(half, _T.ABORT), [CloseTransfer(generation=half.generation)]


def planned(half: Leaver, stayers: frozenset[int]) -> Step:
    """These stayers are READY and wait for this rank's verdict."""
    if half.state in (_S.LISTENING, _S.SENDING, _S.ACKED, _S.STRANDED, _S.LEFT):
        return half, []
    return replace(half, planned=half.planned | stayers), []


def vote_opens(half: Leaver) -> Leaver:
    """The lead casts."""
    return _move(half, _T.OPEN) if half.state is _S.ARMED else half


def vote_closes(half: Leaver, *, granted: bool, boundary: int) -> Step:
    """Granted: every rank knows. Not granted: the lead casts again at the next vote."""
    if granted:
        after = replace(_move(half, _T.GRANT), boundary=boundary)
        return after, standing(after) if half.is_lead else []
    return (_move(half, _T.VETO) if half.state is _S.CASTING else half), []


def release(half: Leaver) -> Step:
    """Rule P7: the next vote has passed without this rank."""
    return _move(half, _T.RELEASE), [EndProcess(why=f"the slot has moved in generation {half.generation}")]


def standing(half: Leaver) -> list[RankAction]:
    """Where it stands, for the controller; with links that are not planned yet, if it matters still."""
    generation = half.generation
    if half.state is _S.LISTENING:
        return []
    if half.state is _S.UNREADY:
        return [Report(report=Unready(generation=generation, why=half.failed))]
    if half.state is _S.LEFT:
        return [Report(report=Left(generation=generation, boundary=half.boundary))]
    if half.is_lead and half.boundary >= 0:
        return [Report(report=Cast(generation=generation, boundary=half.boundary))]
    where: list[RankAction] = [
        Report(report=Ready(generation=generation, linked=tuple(sorted(half.planned)), transfer=half.transfer))
    ]
    if half.state in (_S.ARMED, _S.CASTING):
        where = [Report(report=Armed(generation=generation))]
    more = [Report(report=MoreLinks(generation=generation, linked=tuple(sorted(half.linked))))]
    return [*where, *more] if unplanned(half) and half.boundary < 0 else where


def _move(half: Leaver, trigger: Trigger) -> Leaver:
    who = f"{'lead' if half.is_lead else 'leaver'}, global rank {half.global_rank}, generation {half.generation}"
    return replace(half, state=transition(TRANSITIONS, half.state, trigger, who=who))


def _see_link(half: Leaver, peer: int) -> Step:
    if peer in half.leavers or peer in half.linked:
        return half, []
    after = replace(half, linked=half.linked | {peer})
    more = Report(report=MoreLinks(generation=half.generation, linked=tuple(sorted(after.linked))))
    return after, [more] if half.state in (_S.READY, _S.ARMED) else []


def _reach(half: Leaver, iteration: int) -> Step:
    check_boundary(half.global_rank, iteration, half.boundary)
    after, generation = _move(half, _T.BOUNDARY), half.generation
    actions: list[RankAction] = [
        HoldNewLinks(generation=generation, hold=True),
        StartWait(generation=generation, wait=Wait.LEAD_DECIDES if half.is_lead else Wait.LEAD_VERDICT),
        *([Report(report=AtBoundary(generation=generation))] if half.is_lead else []),
    ]
    strays = unplanned(half)
    why = f"links to global ranks {strays} came up after the vote" if strays else half.failed
    if not why:
        return after, [*actions, SendState(generation=generation)]
    after, more = _decide(replace(after, failed=why)) if half.is_lead else _break(after, why)
    return after, actions + more


def _decide(half: Leaver) -> Step:
    """The lead's verdict, once it stands at the boundary; before that, what came is only remembered."""
    if half.state not in (_S.SENDING, _S.ACKED) or not half.is_lead:
        return half, []
    return (half, []) if (verdict := verdict_of(half)) is None else _conclude(half, leave=verdict)


def _conclude(half: Leaver, *, leave: bool) -> Step:
    after, actions = _obey(half, leave)
    verdict = NoteVerdict(generation=half.generation, leave=leave)
    others = sorted(half.leavers - {half.global_rank})
    notes: list[RankAction] = [SendNote(peer=peer, note=verdict) for peer in others]
    stayed = Stayed(generation=half.generation, why=half.failed, lacking=tuple(sorted(half.lacking)))
    said = [] if leave else [Report(report=stayed)]
    return after, [*notes, *actions, *said]


def _obey(half: Leaver, leave: bool) -> Step:
    """Passes the verdict on: to the stayers that wait for it, and to the joiner rank."""
    after, generation = _move(half, _T.LEAVE if leave else _T.STAY), half.generation
    if leave and half.state is _S.STRANDED and half.global_rank not in half.acked:
        raise ImpossibleTransition(f"leaver {half.global_rank}: LEAVE, but its joiner never had whole state")
    verdict = NoteVerdict(generation=generation, leave=leave)
    notes: list[RankAction] = [SendNote(peer=peer, note=verdict) for peer in sorted(half.planned)]
    tell = SendVerdict(generation=generation, leave=leave)  # it may wait for a joiner that has died: LEFT goes before
    rest = [*standing(after), tell] if leave else [tell, HoldNewLinks(generation=generation, hold=False)]
    return after, [*notes, *rest]


def _break(half: Leaver, why: str) -> Step:
    """The transfer is lost. Before the boundary the switch is given up by this rank's veto or by the controller."""
    if half.state is _S.STRANDED:  # heard twice
        return half, []
    if half.is_lead and half.state in (_S.SENDING, _S.ACKED):
        return _decide(replace(half, failed=half.failed or why, lacking=half.lacking | {half.global_rank}))
    after, generation = _move(half, _T.BROKE), half.generation
    if after.state is _S.UNREADY:
        after = replace(after, failed=why)
        return after, [CloseTransfer(generation=generation), Report(report=Unready(generation=generation, why=why))]
    if after.state is _S.STRANDED:
        after = replace(after, acked=frozenset({half.global_rank}) if half.state is _S.ACKED else frozenset())
        return after, [SendNote(peer=half.lead, note=NoteFailed(generation=generation, why=why))]
    return replace(after, failed=half.failed or why, lacking=half.lacking | {half.global_rank}), []


def _lose(half: Leaver, why: str) -> Step:
    after = _move(half, _T.LOST)
    return after, [no_way_on(half.global_rank, half.generation, why)] if after.state is _S.FAILED else []
