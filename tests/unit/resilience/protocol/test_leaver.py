"""The leaver's half and the lead's: the table as drawn, casting, deciding, and what a failure before LEAVE does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron.resilience.protocol import leaver
from megatron.resilience.protocol.leaver import TRANSITIONS, Leaver, LeaverState
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
    Fail,
    HoldNewLinks,
    ImpossibleTransition,
    LinkAppeared,
    LinkBroke,
    ListenForTransfer,
    NoteCame,
    PeerLost,
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
)

LEAVERS = frozenset({2, 3})
LEAVE = NoteVerdict(generation=5, leave=True)
STAY = NoteVerdict(generation=5, leave=False)


def ready(rank: int = 2, linked: frozenset[int] = frozenset({1})) -> Leaver:
    half, actions = leaver.start(rank, 5, LEAVERS, 2, linked | LEAVERS)
    assert actions == [ListenForTransfer(generation=5)]
    half, actions = leaver.step(half, TransferListening(generation=5, address="h:9"))
    assert actions == [Report(report=Ready(generation=5, linked=tuple(sorted(linked)), transfer="h:9"))]
    return half


def granted(rank: int = 2) -> Leaver:
    half = ready(rank)
    if rank == 2:
        half = leaver.vote_opens(leaver.go(half)[0])
    return leaver.vote_closes(half, granted=True, boundary=8)[0]


def sending(rank: int = 2) -> Leaver:
    return leaver.step(granted(rank), BoundaryReached(iteration=8))[0]


def test_table_is_the_one_drawn() -> None:
    rows = re.findall(r"^([A-Z]+) +([A-Z]+) +([A-Z]+)\b", leaver.__doc__ or "", re.MULTILINE)
    assert {(LeaverState[a], Trigger[b]): LeaverState[c] for a, b, c in rows} == TRANSITIONS
    assert len(rows) == len(TRANSITIONS)


def test_only_the_lead_casts_and_only_after_go() -> None:
    half = leaver.vote_opens(ready())
    assert leaver.casts(half) == 0
    armed, actions = leaver.go(ready())
    assert actions == [Report(report=Armed(generation=5))]
    assert leaver.casts(leaver.vote_opens(armed)) == 5
    assert leaver.casts(leaver.vote_opens(ready(3))) == 0


def test_a_vetoed_lead_casts_again() -> None:
    casting = leaver.vote_opens(leaver.go(ready())[0])
    half, actions = leaver.vote_closes(casting, granted=False, boundary=8)
    assert (half.state, actions) == (LeaverState.ARMED, [])
    assert leaver.casts(leaver.vote_opens(half)) == 5


def test_a_lead_withdraws_until_it_was_granted() -> None:
    for half in (ready(), leaver.go(ready())[0]):
        after, actions = leaver.withdraw(half)
        assert after.state is LeaverState.OVER
        assert actions == [CloseTransfer(generation=5), Report(report=Withdrawn(generation=5))]
    after, actions = leaver.withdraw(granted())
    assert (after.state, actions) == (LeaverState.GRANTED, [Report(report=Cast(generation=5, boundary=8))])
    after, actions = leaver.step(after, BoundaryReached(iteration=8))
    assert after.state is LeaverState.OVER
    assert SendState(generation=5) not in actions
    assert SendNote(peer=1, note=STAY) in actions


def test_a_lead_that_withdraws_at_the_boundary_decides_stay_unless_it_has_decided() -> None:
    sending, _ = leaver.step(granted(), BoundaryReached(iteration=8))
    acked, _ = leaver.step(sending, TransferAcked(generation=5))
    for half in (sending, acked):
        after, actions = leaver.withdraw(half)
        assert after.state is LeaverState.OVER
        assert SendVerdict(generation=5, leave=False) in actions
        assert actions[-1] == Report(report=Stayed(generation=5, why="the controller gave it up"))
    left, _ = leaver.step(acked, NoteCame(sender=3, note=NoteAcked(generation=5)))
    after, actions = leaver.withdraw(left)
    assert (after.state, actions) == (LeaverState.LEFT, [])


def test_new_links_veto_until_they_are_planned() -> None:
    half, actions = leaver.step(ready(), LinkAppeared(peer=7))
    assert actions == [Report(report=MoreLinks(generation=5, linked=(1, 7)))]
    assert "[7]" in leaver.obstacles(half)[0]
    half, _ = leaver.planned(half, frozenset({7}))
    assert leaver.obstacles(half) == ()
    assert leaver.step(ready(), LinkAppeared(peer=3)) == (ready(), [])


def test_links_that_came_after_the_vote_mean_stay() -> None:
    late, _ = leaver.step(granted(), LinkAppeared(peer=7))
    half, actions = leaver.step(late, BoundaryReached(iteration=8))
    assert half.state is LeaverState.OVER
    assert SendState(generation=5) not in actions
    assert SendNote(peer=1, note=STAY) in actions
    other, _ = leaver.step(granted(3), LinkAppeared(peer=7))
    half, actions = leaver.step(other, BoundaryReached(iteration=8))
    assert half.state is LeaverState.STRANDED
    assert isinstance(actions[-1], SendNote)
    assert isinstance(actions[-1].note, NoteFailed)


def test_at_the_boundary_new_links_are_held_and_the_state_is_sent() -> None:
    for rank, wait in ((2, Wait.LEAD_DECIDES), (3, Wait.LEAD_VERDICT)):
        _, actions = leaver.step(granted(rank), BoundaryReached(iteration=8))
        assert actions == [
            HoldNewLinks(generation=5, hold=True),
            StartWait(generation=5, wait=wait),
            *([Report(report=AtBoundary(generation=5))] if rank == 2 else []),
            SendState(generation=5),
        ]


@pytest.mark.parametrize("own_first", [True, False])
def test_the_lead_leaves_when_all_have_acknowledged(own_first: bool) -> None:
    own, other = TransferAcked(generation=5), NoteCame(sender=3, note=NoteAcked(generation=5))
    half, actions = leaver.step(sending(), own if own_first else other)
    assert actions == []
    half, actions = leaver.step(half, other if own_first else own)
    assert half.state is LeaverState.LEFT
    assert actions == [
        SendNote(peer=3, note=LEAVE),
        SendNote(peer=1, note=LEAVE),
        Report(report=Left(generation=5, boundary=8)),
        SendVerdict(generation=5, leave=True),
    ]


@pytest.mark.parametrize(
    ("event", "lacking"),
    [
        (TransferFailed(generation=5, why="reset"), (2,)),
        (NoteCame(sender=3, note=NoteFailed(generation=5, why="reset")), (3,)),
        (WaitedTooLong(generation=5), (2, 3)),
    ],
)
def test_any_failure_before_leave_is_stay(
    event: TransferFailed | NoteCame | WaitedTooLong, lacking: tuple[int, ...]
) -> None:
    half, actions = leaver.step(sending(), event)
    assert half.state is LeaverState.OVER
    assert SendNote(peer=3, note=STAY) in actions
    assert SendNote(peer=1, note=STAY) in actions
    assert SendVerdict(generation=5, leave=False) in actions
    assert HoldNewLinks(generation=5, hold=False) in actions
    assert isinstance(actions[-1], Report)
    assert isinstance(actions[-1].report, Stayed)
    assert actions[-1].report.lacking == lacking, "whose joiners are to blame"


def test_what_comes_after_leave_changes_nothing() -> None:
    half, _ = leaver.step(sending(), TransferAcked(generation=5))
    left, _ = leaver.step(half, NoteCame(sender=3, note=NoteAcked(generation=5)))
    for event in (
        NoteCame(sender=3, note=NoteFailed(generation=5, why="reset")),
        TransferFailed(generation=5, why="reset"),
        WaitedTooLong(generation=5),
        PeerLost(global_rank=1),
    ):
        after, actions = leaver.step(left, event)
        assert after.state is LeaverState.LEFT
        assert actions == []


def test_failures_before_the_boundary_are_remembered() -> None:
    casting = leaver.vote_opens(leaver.go(ready())[0])
    noted, actions = leaver.step(casting, NoteCame(sender=3, note=NoteFailed(generation=5, why="reset")))
    assert actions == []
    half, _ = leaver.vote_closes(noted, granted=True, boundary=8)
    half, actions = leaver.step(half, BoundaryReached(iteration=8))
    assert half.state is LeaverState.OVER
    assert SendNote(peer=1, note=STAY) in actions
    assert Report(report=Stayed(generation=5, why="global rank 3: reset", lacking=(3,))) in actions


def test_a_link_that_comes_up_after_the_vote_is_nobodys_fault() -> None:
    linked, _ = leaver.step(granted(2), LinkAppeared(peer=7))
    _, actions = leaver.step(linked, BoundaryReached(iteration=8))
    why = "links to global ranks [7] came up after the vote"
    assert actions[-1] == Report(report=Stayed(generation=5, why=why))


def test_another_leaver_rank_tells_the_lead_and_passes_its_verdict_on() -> None:
    half, actions = leaver.step(sending(3), TransferAcked(generation=5))
    assert actions == [SendNote(peer=2, note=NoteAcked(generation=5))]
    half, actions = leaver.step(half, NoteCame(sender=2, note=LEAVE))
    assert half.state is LeaverState.LEFT
    left = Report(report=Left(generation=5, boundary=8))
    assert actions == [SendNote(peer=1, note=LEAVE), left, SendVerdict(generation=5, leave=True)]
    half, actions = leaver.release(half)
    assert isinstance(actions[0], EndProcess)


def test_a_stranded_rank_obeys_the_lead_but_not_the_impossible() -> None:
    acked, _ = leaver.step(sending(3), TransferAcked(generation=5))
    stranded, actions = leaver.step(acked, TransferFailed(generation=5, why="reset"))
    assert actions == [SendNote(peer=2, note=NoteFailed(generation=5, why="reset"))]
    assert leaver.step(stranded, NoteCame(sender=2, note=LEAVE))[0].state is LeaverState.LEFT
    lacking, _ = leaver.step(sending(3), TransferFailed(generation=5, why="reset"))
    with pytest.raises(ImpossibleTransition, match="never had whole state"):
        leaver.step(lacking, NoteCame(sender=2, note=LEAVE))


def test_a_lead_that_is_gone_or_silent_is_an_error() -> None:
    for event in (PeerLost(global_rank=2), WaitedTooLong(generation=5)):
        half, actions = leaver.step(sending(3), event)
        assert half.state is LeaverState.FAILED
        assert isinstance(actions[0], Fail)


def test_nowhere_to_give_the_state_vetoes_and_can_be_tried_again() -> None:
    half, actions = leaver.step(ready(3), LinkBroke(generation=5, why="in use"))
    assert actions == [CloseTransfer(generation=5), Report(report=Unready(generation=5, why="in use"))]
    assert "in use" in leaver.obstacles(half)[0]
    again, actions = leaver.repeat(half)
    assert (again.state, actions) == (LeaverState.LISTENING, [ListenForTransfer(generation=5)])
    assert leaver.obstacles(again)
    with pytest.raises(ImpossibleTransition):
        leaver.vote_closes(half, granted=True, boundary=8)


def test_a_release_before_leave_is_impossible() -> None:
    with pytest.raises(ImpossibleTransition, match="release"):
        leaver.release(sending(3))
    assert leaver.may_leave(replace(sending(), acked=LEAVERS))
