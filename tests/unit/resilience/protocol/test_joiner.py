"""The joiner's half: builds, fetches, goes live on the lead's word, and asks when there is none."""

from __future__ import annotations

import re

import pytest

from megatron.resilience.protocol import joiner
from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.joiner import TRANSITIONS, Joiner, JoinerState
from megatron.resilience.protocol.messages import Built, InDoubt, PrepareJoiner, Ready, Running, Unready
from megatron.resilience.protocol.switch import (
    BuildFinished,
    EndProcess,
    Fail,
    FetchState,
    GoLive,
    ImpossibleTransition,
    LinkBroke,
    Report,
    StartWait,
    TransferFailed,
    TransferWhole,
    Trigger,
    VerdictCame,
    VoteClosed,
    Wait,
    WaitedTooLong,
)
from megatron.resilience.protocol.vote import Contribution

BUILD = BuildFinished(endpoint="h:1", facts=Facts(torch="2"), memory_bytes=7)
PREPARE = PrepareJoiner(generation=4, transfer="h:9", joiners={1: "h:j"})


def built() -> Joiner:
    return joiner.step(Joiner(global_rank=1, generation=4), BUILD)[0]


def whole() -> Joiner:
    return joiner.step(joiner.prepare(built(), PREPARE)[0], TransferWhole(generation=4))[0]


def doubting() -> Joiner:
    return joiner.step(whole(), TransferFailed(generation=4, why="reset"))[0]


def test_table_is_the_one_drawn() -> None:
    rows = re.findall(r"^([A-Z]+) +([A-Z]+) +([A-Z]+)\b", joiner.__doc__ or "", re.MULTILINE)
    assert {(JoinerState[a], Trigger[b]): JoinerState[c] for a, b, c in rows} == TRANSITIONS
    assert len(rows) == len(TRANSITIONS)


def test_it_builds_and_is_ready_once_it_knows_where_to_fetch() -> None:
    half, actions = joiner.step(Joiner(global_rank=1, generation=4), BUILD)
    told = Report(report=Built(generation=4, endpoint="h:1", facts=Facts(torch="2"), memory_bytes=7))
    assert actions == [told]
    ready, actions = joiner.prepare(half, PREPARE)
    assert actions == [FetchState(generation=4, address="h:9", joiners={1: "h:j"}), Report(report=Ready(generation=4))]
    again, actions = joiner.prepare(ready, PREPARE)
    assert (again, actions) == (ready, [Report(report=Ready(generation=4))])
    assert joiner.standing(ready) == [told, Report(report=Ready(generation=4))]
    assert joiner.standing(half) == [told]
    assert joiner.standing(Joiner(global_rank=1, generation=4)) == []


def test_it_goes_live_on_leave_and_settles_after_its_first_vote() -> None:
    half, actions = joiner.step(whole(), VerdictCame(generation=4, leave=True))
    assert actions == [GoLive(generation=4)]
    half, actions = joiner.step(half, VoteClosed(iteration=9, result=Contribution()))
    assert half.state is JoinerState.SETTLED
    assert actions == [Report(report=Running(generation=4, iteration=9))]


def test_leave_without_whole_state_is_impossible() -> None:
    with pytest.raises(ImpossibleTransition, match="leave"):
        joiner.step(joiner.prepare(built(), PREPARE)[0], VerdictCame(generation=4, leave=True))


def test_stay_and_abort_end_it() -> None:
    for half in (joiner.prepare(built(), PREPARE)[0], whole(), doubting()):
        after, actions = joiner.step(half, VerdictCame(generation=4, leave=False))
        assert after.state is JoinerState.ENDED
        assert isinstance(actions[0], EndProcess)
    for half in (Joiner(global_rank=1, generation=4), built(), whole(), doubting()):
        assert joiner.abort(half, "no")[0].state is JoinerState.ENDED


def test_a_leaver_that_cannot_be_reached_withdraws_ready() -> None:
    half, actions = joiner.step(joiner.prepare(built(), PREPARE)[0], LinkBroke(generation=4, why="refused"))
    assert half.state is JoinerState.BUILT
    assert actions == [Report(report=Unready(generation=4, why="refused"))]
    assert joiner.step(half, LinkBroke(generation=4, why="refused")) == (half, [])


def test_with_whole_state_and_no_verdict_it_asks() -> None:
    half, actions = joiner.step(whole(), TransferFailed(generation=4, why="reset"))
    assert actions == [Report(report=InDoubt(generation=4)), StartWait(generation=4, wait=Wait.DOUBT)]
    assert joiner.standing(half) == [Report(report=InDoubt(generation=4))]
    live, actions = joiner.resolve(half)
    assert (live.state, actions) == (JoinerState.LIVE, [GoLive(generation=4)])
    assert joiner.resolve(live) == (live, [])
    late, actions = joiner.step(half, WaitedTooLong(generation=4))
    assert late.state is JoinerState.FAILED
    assert isinstance(actions[0], Fail)
