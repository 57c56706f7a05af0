"""The phases of a switch as the controller drives it: order, undoing before and after GO, deadlines."""

from __future__ import annotations

import re

import pytest

from megatron.resilience.protocol import switch_drive
from megatron.resilience.protocol.controller_words import Journal, Send
from megatron.resilience.protocol.journal import SwitchAborted, SwitchBegun, SwitchGo, SwitchWithdraw
from megatron.resilience.protocol.memory import Peak, Room
from megatron.resilience.protocol.messages import (
    Abort,
    AskStatus,
    Built,
    Cast,
    Discard,
    Go,
    InDoubt,
    Left,
    Measured,
    MoreLinks,
    Planned,
    PrepareJoiner,
    PrepareLeaver,
    PrepareStayer,
    Progress,
    ProgressLine,
    Query,
    Ready,
    Release,
    Resolve,
    Running,
    StartRanks,
    StatusAnswer,
    Stayed,
    Table,
    ToRank,
    Unready,
    Withdraw,
    Withdrawn,
)
from megatron.resilience.protocol.switch import ImpossibleTransition
from megatron.resilience.protocol.switch_drive import TRANSITIONS
from megatron.resilience.protocol.switch_sends import Phase
from tests.unit.resilience.protocol.controller_talk import FACTS, Talk, going, running


def test_table_is_the_one_drawn() -> None:
    rows = re.findall(r"^([A-Z]+) +([a-z]+) +([A-Z]+)\b", switch_drive.__doc__ or "", re.MULTILINE)
    assert {(Phase[a], b): Phase[c] for a, b, c in rows} == TRANSITIONS
    assert len(rows) == len(TRANSITIONS)


def test_what_the_table_does_not_have_raises() -> None:
    drive = going().core.commands.drive
    assert drive is not None
    with pytest.raises(ImpossibleTransition, match="found 'running' in GOING"):
        drive._enter("running")


def test_leavers_are_prepared_before_stayers_and_go_comes_last() -> None:
    talk = running()
    talk.migrate("m1")
    assert [(name, start.generation) for name, start in talk.said(StartRanks)] == [("m2", 2)]
    talk.build(2, 1, 2)
    assert talk.said(PrepareLeaver) == [("m1", PrepareLeaver(generation=2, leavers=(1,), lead=1))]
    assert talk.said(PrepareStayer) == []
    talk.report(1, 1, Ready(generation=2, linked=(0,), transfer="h1:t"))
    assert talk.said(PrepareStayer) == [("m0", PrepareStayer(generation=2, joiners={1: "h2:1"}, linked=(1,)))]
    assert talk.said(PrepareJoiner) == [("m2", PrepareJoiner(generation=2, transfer="h1:t", joiners={1: "h2:1"}))]
    talk.report(2, 1, Ready(generation=2), started=2)
    assert talk.said(Go) == []
    actions = talk.report(0, 0, Ready(generation=2, linked=(1,)))
    assert talk.said(Go) == [("m1", Go(generation=2))]
    kinds = [a.entry if isinstance(a, Journal) else a.message for a in actions if isinstance(a, Journal | Send)]
    first, second = kinds
    assert isinstance(first, SwitchGo), "GO is journalled before it is sent"
    assert isinstance(second, ToRank)


def test_stayers_without_a_link_hear_nothing_before_it_is_over() -> None:
    talk = running()
    talk.migrate("m1")
    talk.build(2, 1, 2)
    talk.report(1, 1, Ready(generation=2, linked=(), transfer="h1:t"))
    talk.report(2, 1, Ready(generation=2), started=2)
    assert talk.said(Go)
    assert not [action for action in talk.last if isinstance(action, Send) and action.machine_id == "m0"]


def test_before_go_the_controller_aborts_by_itself() -> None:
    talk = running()
    talk.migrate("m1", to=("m2",))
    talk.build(2, 1, 2)
    talk.report(1, 1, Ready(generation=2, linked=(0,), transfer="h1:t"))
    talk.report(0, 0, Unready(generation=2, why="refused"))
    aborted = [entry for entry in talk.entries if isinstance(entry, SwitchAborted)]
    assert [entry.blamed for entry in aborted] == [("m2",)]
    assert {name for name, _ in talk.said(Abort)} == {"m0", "m1"}
    assert [name for name, _ in talk.said(Discard)] == ["m2"]
    assert talk.said(Withdraw) == []


def both_leave() -> Talk:
    """m0 for m2 and m1 for m3, one linked to the other, all built and listening."""
    talk = running()
    talk.migrate("m0", "m1")
    for rank in range(2):
        talk.build(2 + rank, rank, 2)
    for rank in range(2):
        talk.report(rank, rank, Ready(generation=2, linked=(1 - rank,), transfer=f"h{rank}:t"))
    return talk


def test_only_those_are_blamed_whom_it_concerns() -> None:
    talk = both_leave()
    talk.report(3, 1, Unready(generation=2, why="reset"), started=2)
    assert talk.core.desk.ledger.failures == {"m3": 1}
    talk = both_leave()
    talk.report(1, 1, Unready(generation=2, why="in use"))
    assert talk.core.desk.ledger.failures == {}, "a leaver's trouble is no joiner's"
    talk = both_leave()
    talk.report(2, 0, Ready(generation=2), started=2)
    assert late(talk).endswith("; not heard from: m3")
    assert talk.core.desk.ledger.failures == {"m3": 1}


def test_after_go_the_lead_is_asked_first() -> None:
    talk = going()
    talk.end(2, 1, 2)
    assert isinstance(talk.entries[-1], SwitchWithdraw)
    assert talk.said(Withdraw) == [("m1", Withdraw(generation=2))]
    assert talk.said(Abort) == []
    talk.report(1, 1, Withdrawn(generation=2))
    assert {name for name, _ in talk.said(Abort)} == {"m0", "m1"}
    begun = [entry for entry in talk.entries if isinstance(entry, SwitchBegun)]
    assert begun[-1].moves[0].joiner == "m3", "the next candidate"


def test_the_verdict_stay_aborts_and_the_next_is_tried() -> None:
    talk = going()
    talk.report(1, 1, Cast(generation=2, boundary=9))
    talk.report(1, 1, Stayed(generation=2, why="reset", lacking=(1,)))
    assert talk.core.desk.ledger.incidents[2].why == "the verdict was STAY: reset"
    assert talk.core.desk.ledger.failures == {"m2": 1}
    talk = going()
    talk.report(1, 1, Stayed(generation=2, why="links came up after the vote"))
    assert talk.core.desk.ledger.failures == {}


def test_a_joiner_that_dies_after_leave_fails_the_job_whichever_is_heard_first() -> None:
    talk = going()
    talk.report(1, 1, Left(generation=2, boundary=9))
    talk.end(2, 1, 2)
    assert talk.core.desk.ledger.ended
    talk = going()
    talk.end(2, 1, 2)
    talk.report(1, 1, Left(generation=2, boundary=9))
    assert "after the point of no return" in talk.core.desk.ledger.ended_why


def test_running_tells_of_leave_when_the_leads_word_was_lost() -> None:
    talk = going()
    talk.report(2, 1, Running(generation=2, iteration=9), started=2)
    assert talk.core.desk.ledger.table == ["m0", "m2"]
    assert talk.core.desk.ledger.boundaries == {2: 9}
    first, *_ = talk.said(Table)
    assert first[1].directory.endpoints == {0: "h0:0", 1: "h2:1"}
    assert first[1].directory.slot_generations == (1, 2)


def test_links_that_come_up_later_are_prepared_and_planned() -> None:
    talk = running()
    talk.migrate("m1")
    talk.build(2, 1, 2)
    talk.report(1, 1, Ready(generation=2, linked=(), transfer="h1:t"))
    talk.report(2, 1, Ready(generation=2), started=2)
    talk.report(1, 1, MoreLinks(generation=2, linked=(0,)))
    assert talk.said(PrepareStayer) == [("m0", PrepareStayer(generation=2, joiners={1: "h2:1"}, linked=(1,)))]
    talk.report(0, 0, Ready(generation=2, linked=(1,)))
    assert talk.said(Planned) == [("m1", Planned(generation=2, stayers=(0,)))]


def test_a_joiner_in_doubt_is_told_or_the_lead_is_asked() -> None:
    talk = going()
    talk.report(2, 1, InDoubt(generation=2), started=2)
    assert talk.said(Query) == [("m1", Query(generation=2))]
    talk.report(1, 1, Left(generation=2, boundary=9))
    assert talk.said(Resolve) == [("m2", Resolve(generation=2))]
    talk.report(2, 1, InDoubt(generation=2), started=2)
    assert talk.said(Resolve) == [("m2", Resolve(generation=2))]


def late(talk: Talk) -> str:
    talk.wait(0)
    talk.wait(1_001)
    return talk.core.desk.ledger.incidents[2].why if 2 in talk.core.desk.ledger.incidents else ""


def test_every_phase_has_its_deadline() -> None:
    talk = running()
    talk.migrate("m1")
    assert late(talk) == "'start joiner' took longer than 1000 ms; not heard from: m2"
    talk = running()
    talk.migrate("m1")
    talk.build(2, 1, 2)
    talk.lose(1)
    assert late(talk) == "'prepare leaver' took longer than 1000 ms; not heard from: m1 (its agent is away)"
    assert talk.core.desk.ledger.failures == {}
    talk = running()
    talk.migrate("m1")
    talk.build(2, 1, 2)
    talk.report(1, 1, Ready(generation=2, linked=(0,), transfer="h1:t"))
    talk.report(2, 1, Ready(generation=2), started=2)
    assert late(talk) == "'prepare links' took longer than 1000 ms; not heard from: m0"
    assert talk.core.desk.ledger.failures == {}
    talk = going()
    assert late(talk) == ""
    assert isinstance(talk.entries[-1], SwitchWithdraw)
    talk = going()
    talk.report(1, 1, Left(generation=2, boundary=9))
    late(talk)
    assert "'first iteration' took longer" in talk.core.desk.ledger.ended_why


def test_a_rank_past_the_boundary_tells_that_joiners_run_whose_agents_are_away() -> None:
    for word in (
        Progress(iteration=10, median_iteration_ms=1.0),
        Measured(generation=2, boundary=9, median_iteration_ms=1.0),
    ):
        talk = going()
        talk.report(1, 1, Left(generation=2, boundary=9))
        talk.heard(2)
        talk.lose(2)
        talk.report(0, 0, Progress(iteration=9, median_iteration_ms=1.0))
        talk.heard(0)
        assert talk.said(Release) == []
        talk.report(0, 0, word)
        assert [name for name, _ in talk.said(Release)] == ["m1"]
    talk = going()
    talk.report(0, 0, Measured(generation=2, boundary=9, median_iteration_ms=1.0))
    assert isinstance(talk.entries[-1], SwitchGo), "a far rank measures before it knows the verdict"


def test_while_nobody_can_tell_the_job_is_not_stopped() -> None:
    talk = going()
    talk.report(1, 1, Left(generation=2, boundary=9))
    talk.lose(0)
    talk.lose(2)
    talk.wait(1_001)
    talk.wait(1_001)
    assert not talk.core.desk.ledger.ended
    talk.hello(0, (0, 1))
    talk.wait(1_001)
    late_words = "'first iteration' took longer than 1000 ms; not heard from: m2 (its agent is away), after"
    assert late_words in talk.core.desk.ledger.ended_why


def test_who_waits_is_told_for_whom_when_there_is_no_end_to_it() -> None:
    talk = going()
    talk.end(2, 1, 2)
    talk.lose(1)
    withdraw = "'withdraw' took longer than 1000 ms; not heard from: m1 (its agent is away)"
    for _ in range(2):
        talk.wait(1_001)
        assert [line.text for line in talk.answers(ProgressLine)] == [f"{withdraw}; still waiting"]
    talk.ask(AskStatus())
    assert talk.answers(StatusAnswer)[0].switch == withdraw
    talk = going()
    talk.lose(0)
    talk.report(1, 1, Left(generation=2, boundary=9))
    talk.report(2, 1, Running(generation=2, iteration=9), started=2)
    talk.heard(2)
    talk.wait(1_001)
    assert "not heard from: m0 (its agent is away)" in talk.answers(ProgressLine)[0].text


def test_a_joiner_whose_agent_is_away_is_given_up() -> None:
    talk = going()
    talk.lose(2)
    talk.wait(400)
    assert talk.said(Withdraw) == []
    talk.wait(200)
    assert talk.said(Withdraw)
    talk.report(1, 1, Left(generation=2, boundary=9))
    talk.wait(200)
    assert not talk.core.desk.ledger.ended, "an agent that is away is no death"


def test_less_room_than_the_leaver_has_needed_refuses_the_joiner_and_asks_the_next() -> None:
    talk = running()
    talk.migrate("m1", to=())
    (started,) = talk.said(StartRanks)
    room = Room(host_held_bytes=50, host_free_bytes=449)
    talk.report(
        int(started[0][1:]),
        1,
        Built(generation=2, endpoint="h2:1", facts=FACTS, memory_bytes=50, room=room),
        started=2,
    )
    assert talk.said(PrepareLeaver)
    talk.report(1, 1, Ready(generation=2, linked=(0,), transfer="t", peak=Peak(host_bytes=500)))
    assert talk.said(PrepareStayer) == []
    assert [name for name, _ in talk.said(Discard)] == [started[0]]
    why = talk.core.desk.ledger.incidents[2].why
    assert "will need 500 bytes, 450 bytes more than now, and 449 bytes is free" in why
    ((other, _),) = talk.said(StartRanks)
    assert other != started[0]


def test_after_a_restart_it_is_the_same_whoever_of_the_two_is_heard_first() -> None:
    talk = running()
    talk.migrate("m1", to=("m2",))
    talk.restart()
    talk.hello(0, (0, 1), term=1)
    talk.hello(1, (1, 1), term=1)
    talk.hello(2, (1, 2), term=1)
    talk.report(1, 1, Ready(generation=2, linked=(0,), transfer="t", peak=Peak(host_bytes=500)))
    room = Room(host_held_bytes=50, host_free_bytes=449)
    built = Built(generation=2, endpoint="h2:1", facts=FACTS, memory_bytes=50, room=room)
    talk.report(2, 1, built, started=2)
    assert "449 bytes is free" in talk.core.desk.ledger.incidents[2].why


def test_too_little_memory_refuses_the_joiner() -> None:
    talk = running()
    talk.hello(2, memory=60)
    talk.migrate("m1", to=("m2",))
    talk.report(2, 1, Built(generation=2, endpoint="h2:1", facts=FACTS, memory_bytes=61), started=2)
    assert "machine m2 has 60 bytes of memory, its ranks need 61" in talk.core.desk.ledger.incidents[2].why
