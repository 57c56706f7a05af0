"""The stayer's half: its table as drawn, and what it says and does at each step."""

from __future__ import annotations

import re

import pytest

from megatron.resilience.protocol import stayer
from megatron.resilience.protocol.messages import NoteVerdict, PrepareStayer, Ready, Unready
from megatron.resilience.protocol.stayer import TRANSITIONS, Stayer, StayerState
from megatron.resilience.protocol.switch import (
    AbortLinks,
    BoundaryReached,
    CommitLinks,
    Fail,
    ImpossibleTransition,
    LinkAppeared,
    LinkBroke,
    LinksPrepared,
    NoteCame,
    PeerLost,
    PrepareLinks,
    Report,
    StartWait,
    Trigger,
    Wait,
    WaitedTooLong,
)

JOINERS = {3: "h:3", 4: "h:4"}
PREPARE = PrepareStayer(generation=2, joiners=JOINERS, linked=(3,))
FAR = Stayer(global_rank=1)


def ready(*linked: int) -> Stayer:
    half, _ = stayer.prepare(FAR, PrepareStayer(generation=2, joiners=JOINERS, linked=linked or (3,)))
    return stayer.step(half, LinksPrepared(generation=2))[0]


def awaiting(*linked: int) -> Stayer:
    granted, _ = stayer.grant(ready(*linked), 7)
    return stayer.step(granted, BoundaryReached(iteration=7))[0]


def verdict(sender: int, leave: bool) -> NoteCame:
    return NoteCame(sender=sender, note=NoteVerdict(generation=2, leave=leave))


def test_table_is_the_one_drawn() -> None:
    rows = re.findall(r"^([A-Z]+) +([A-Z]+) +([A-Z]+)\b", stayer.__doc__ or "", re.MULTILINE)
    assert {(StayerState[a], Trigger[b]): StayerState[c] for a, b, c in rows} == TRANSITIONS
    assert len(rows) == len(TRANSITIONS)


def test_it_prepares_and_says_ready() -> None:
    half, actions = stayer.prepare(FAR, PREPARE)
    assert actions == [PrepareLinks(generation=2, joiners=JOINERS)]
    assert stayer.obstacles(half)
    half, actions = stayer.step(half, LinksPrepared(generation=2))
    assert actions == [Report(report=Ready(generation=2, linked=(3,)))]
    assert not stayer.obstacles(half)


def test_asked_again_it_answers_again_and_more_leavers_are_added() -> None:
    half, actions = stayer.prepare(ready(), PREPARE)
    assert (half.state, actions) == (StayerState.READY, [Report(report=Ready(generation=2, linked=(3,)))])
    half, actions = stayer.prepare(ready(), PrepareStayer(generation=2, joiners=JOINERS, linked=(4,)))
    assert half.state is StayerState.PREPARING
    assert actions == [PrepareLinks(generation=2, joiners=JOINERS)]
    half, actions = stayer.step(half, LinksPrepared(generation=2))
    assert actions == [Report(report=Ready(generation=2, linked=(3, 4)))]


def test_links_that_were_asked_for_twice_are_told_twice_whatever_has_come_between() -> None:
    half, _ = stayer.prepare(FAR, PREPARE)
    half, _ = stayer.prepare(half, PrepareStayer(generation=2, joiners=JOINERS, linked=(4,)))
    half, _ = stayer.step(half, LinksPrepared(generation=2))
    granted, _ = stayer.grant(half, 7)
    assert stayer.step(granted, LinksPrepared(generation=2)) == (granted, [])
    waits, _ = stayer.step(granted, BoundaryReached(iteration=7))
    assert stayer.step(waits, LinksPrepared(generation=2)) == (waits, [])


def test_a_broken_link_withdraws_ready_and_vetoes() -> None:
    half, actions = stayer.step(ready(), LinkBroke(generation=2, why="reset"))
    assert actions == [Report(report=Unready(generation=2, why="reset"))]
    assert "reset" in stayer.obstacles(half)[0]
    again, _ = stayer.prepare(half, PREPARE)
    assert again.state is StayerState.PREPARING


def test_another_link_to_a_leaver_is_prepared_too_and_one_to_others_is_not() -> None:
    half, actions = stayer.step(ready(), LinkAppeared(peer=3))
    assert actions == [PrepareLinks(generation=2, joiners=JOINERS)]
    assert stayer.obstacles(half)
    assert stayer.step(ready(), LinkAppeared(peer=5)) == (ready(), [])


def test_at_the_boundary_it_waits_for_each_leaver_and_commits() -> None:
    granted, _ = stayer.grant(ready(3, 4), 7)
    half, actions = stayer.step(granted, BoundaryReached(iteration=7))
    assert actions == [StartWait(generation=2, wait=Wait.LEAVER_VERDICT)]
    half, actions = stayer.step(half, verdict(3, True))
    assert half.at_boundary
    assert actions == []
    half, actions = stayer.step(half, verdict(4, True))
    assert half == FAR
    assert actions == [CommitLinks(generation=2, joiners=JOINERS)]


def test_stay_drops_what_was_prepared() -> None:
    half, actions = stayer.step(awaiting(), verdict(3, False))
    assert (half, actions) == (FAR, [AbortLinks(generation=2)])


def test_verdicts_that_come_early_count_at_the_boundary() -> None:
    early, actions = stayer.step(ready(), verdict(3, True))
    assert actions == []
    granted, _ = stayer.grant(early, 7)
    half, actions = stayer.step(granted, BoundaryReached(iteration=7))
    assert (half, actions) == (FAR, [CommitLinks(generation=2, joiners=JOINERS)])


def test_a_leaver_that_is_gone_or_silent_is_an_error_that_says_what_to_do() -> None:
    for event in (PeerLost(global_rank=3), WaitedTooLong(generation=2)):
        half, actions = stayer.step(awaiting(), event)
        assert half.state is StayerState.FAILED
        (failure,) = actions
        assert isinstance(failure, Fail)
        assert "3" in failure.why
        assert "checkpoint" in failure.why
    assert stayer.step(awaiting(), PeerLost(global_rank=5)) == (awaiting(), [])


def test_verdicts_that_differ_are_impossible() -> None:
    half, _ = stayer.step(awaiting(3, 4), verdict(3, True))
    with pytest.raises(ImpossibleTransition, match="differ"):
        stayer.step(half, verdict(4, False))


def test_a_grant_is_impossible_unless_ready() -> None:
    preparing, _ = stayer.prepare(FAR, PREPARE)
    unready, _ = stayer.step(ready(), LinkBroke(generation=2, why="x"))
    for half in (FAR, preparing, unready):
        with pytest.raises(ImpossibleTransition, match="expected one of"):
            stayer.grant(half, 7)


def test_another_boundary_than_the_granted_one_is_impossible() -> None:
    granted, _ = stayer.grant(ready(), 7)
    with pytest.raises(ImpossibleTransition, match="expected boundary 7"):
        stayer.step(granted, BoundaryReached(iteration=8))


def test_abort_drops_and_forgets() -> None:
    assert stayer.abort(ready()) == (FAR, [AbortLinks(generation=2)])
