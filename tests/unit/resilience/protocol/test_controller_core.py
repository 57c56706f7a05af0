"""The controller's core: a job's beginning and end, machines that come, go and come back, restarts."""

from __future__ import annotations

import msgspec
import pytest

from megatron.resilience.protocol.controller_words import Close, Journal, Send
from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.journal import JobEnded, JobRunning, JobStarted, SwitchBegun
from megatron.resilience.protocol.messages import (
    Abort,
    AgentHello,
    AskStatus,
    Discard,
    Left,
    Query,
    Rejected,
    Release,
    Running,
    StartRanks,
    StartRefused,
    StatusAnswer,
    StopJob,
    Table,
    Welcome,
)
from tests.unit.resilience.protocol.controller_talk import LIMITS, Talk, going, running


def test_a_job_starts_when_its_slots_can_be_filled_and_runs_when_all_are_built() -> None:
    talk = Talk()
    talk.hello(2)
    talk.hello(0)
    assert talk.entries == []
    actions = talk.hello(1)
    journals = [action.entry for action in actions if isinstance(action, Journal)]
    assert journals == [JobStarted(time_ms=0.0, machines=("m0", "m1"), incarnations=(1, 1))]
    assert [(name, start.slot) for name, start in talk.said(StartRanks)] == [("m0", 0), ("m1", 1)]
    assert actions.index(next(a for a in actions if isinstance(a, Journal))) < actions.index(
        next(a for a in actions if isinstance(a, Send) and isinstance(a.message, StartRanks))
    )
    talk.build(0, 0, 1)
    talk.build(1, 1, 1)
    assert isinstance(talk.entries[-1], JobRunning)
    assert talk.entries[-1].slot_memory_bytes == 50


def test_the_directory_goes_out_when_it_is_whole() -> None:
    talk = Talk()
    for machine in range(2):
        talk.hello(machine)
    talk.build(0, 0, 1)
    assert talk.said(Table) == []
    from megatron.resilience.protocol.messages import WorkerHello

    talk.report(1, 1, WorkerHello(generation=1, endpoint="h1:1", facts=Facts()))
    assert [name for name, _ in talk.said(Table)] == ["m0", "m1"]
    assert talk.said(Table)[0][1].directory.endpoints == {0: "h0:0", 1: "h1:1"}


def test_ranks_that_differ_stop_the_job_with_the_reason() -> None:
    talk = Talk()
    for machine in range(2):
        talk.hello(machine)
    talk.build(0, 0, 1)
    talk.build(1, 1, 1, Facts(torch="2", model_digest="other"))
    assert isinstance(talk.entries[-1], JobEnded)
    assert "model configuration" in talk.entries[-1].why
    assert {name for name, _ in talk.said(StopJob)} == {"m0", "m1"}


def test_a_rank_that_fails_ends_the_job_and_one_that_finishes_does_not_alone() -> None:
    talk = running()
    talk.end(0, 0, 1, code=0)
    assert not talk.core.desk.ledger.ended
    talk.end(1, 1, 1, code=0)
    assert talk.core.desk.ledger.ended_ok
    assert {stop.ok for _, stop in talk.said(StopJob)} == {True}
    talk = running()
    talk.end(1, 1, 1)
    assert {stop.ok for _, stop in talk.said(StopJob)} == {False}
    assert talk.core.desk.ledger.ended_why == "global rank 1 on machine m1 ended: killed"


def test_a_lost_connection_is_no_death() -> None:
    talk = running()
    talk.lose(1)
    talk.wait(1e9)
    assert not talk.core.desk.ledger.ended
    talk.hello(1, (1, 1))
    assert talk.said(Welcome)
    assert not talk.core.desk.ledger.ended


@pytest.mark.parametrize("incarnation", [1, 3])
def test_a_machine_that_has_started_anew_has_lost_its_ranks(incarnation: int) -> None:
    """The clock it is numbered by may have been set back."""
    talk = running(incarnation=2)
    talk.lose(1)
    talk.wait(LIMITS.settle_ms)
    talk.hello(1, incarnation=incarnation)
    assert talk.core.desk.ledger.ended_why == "machine m1 has started anew, its ranks are gone"
    talk = running(incarnation=2)
    talk.restart()
    talk.wait(0)
    talk.wait(LIMITS.settle_ms)
    talk.hello(1, incarnation=incarnation)
    assert talk.core.desk.ledger.ended, "incarnations are journalled"


def test_a_second_agent_with_the_name_of_a_slots_holder_is_turned_away_while_that_one_may_be_there() -> None:
    talk = running()
    talk.hello(1, incarnation=2, connection=11)
    ((name, rejected),) = talk.said(Rejected)
    assert (name, rejected.final) == ("m1", False)
    assert "expected one agent a machine; set another TRAINMOVER_MACHINE" in rejected.why
    assert [action.connection for action in talk.last if isinstance(action, Close)] == [11]
    talk.lose(1)
    talk.wait(LIMITS.settle_ms - 1)
    talk.hello(1, incarnation=2, connection=12)
    assert "holds slot 1" in talk.said(Rejected)[0][1].why
    talk.restart()
    talk.hello(1, incarnation=2, connection=13)
    assert talk.said(Rejected)
    talk.hello(1, (1, 1), connection=14)
    assert talk.said(Welcome)
    talk.wait(LIMITS.settle_ms)
    talk.hello(1, incarnation=2, connection=15)
    assert talk.said(Rejected)
    assert not talk.core.desk.ledger.ended
    talk.core.fail_job("over")
    talk.hello(1, incarnation=2, connection=16)
    assert talk.said(StopJob)


def test_an_agent_of_another_job_or_shape_is_turned_away_for_good_and_who_is_missing_is_told() -> None:
    talk = Talk()
    talk.hello(1)
    told = AgentHello(
        machine_id="m0",
        incarnation=1,
        job="j",
        machines=2,
        ranks_per_machine=1,
        capacity=Capacity(ranks=1, memory_bytes=1),
        facts=Facts(),
    )
    talk.says(0, msgspec.structs.replace(told, ranks_per_machine=2))
    ((_, rejected),) = talk.said(Rejected)
    assert "found --ranks-per-machine 2" in rejected.why
    assert rejected.final
    assert any(isinstance(action, Close) for action in talk.last)
    talk.ask(AskStatus())
    (status,) = talk.answers(StatusAnswer)
    assert (status.state, status.why) == ("assembling", "1 of 2 machines are here")
    talk.says(0, told)
    assert talk.said(StartRanks)


def test_a_joiner_that_has_started_anew_is_given_up() -> None:
    talk = running()
    talk.migrate("m1")
    talk.lose(2)
    talk.hello(2, incarnation=2)
    assert talk.core.desk.ledger.incidents[2].why == "machine m2 has started anew, its ranks are gone"
    drive = talk.core.commands.drive
    assert drive is not None
    assert drive.moves[0].joiner == "m3"


def test_after_a_restart_a_command_waits_until_agents_had_time_to_attach() -> None:
    talk = running()
    talk.migrate("m1", to=("m2",))
    talk.entries = [entry for entry in talk.entries if not isinstance(entry, SwitchBegun)]
    talk.restart()
    talk.wait(1_000)
    assert talk.core.commands.drive is None
    assert talk.core.desk.ledger.queue
    for machine, ranks in ((0, [(0, 1)]), (1, [(1, 1)]), (2, [])):
        talk.hello(machine, *ranks)
    talk.wait(4_999)
    assert talk.core.commands.drive is None
    talk.wait(1)
    assert talk.core.commands.drive is not None


def test_older_controllers_are_fenced() -> None:
    talk = running()
    talk.hello(3, term=7)
    assert any(isinstance(action, Close) for action in talk.last)
    assert "newer controller" in talk.said(Rejected)[0][1].why


def test_an_older_connection_of_a_machine_is_not_listened_to() -> None:
    talk = running()
    from megatron.resilience.protocol.controller_words import AgentSaid
    from megatron.resilience.protocol.messages import HeldRank

    machine = talk.core.desk.members.machines["m1"]
    hello = AgentHello(
        machine_id="m1",
        incarnation=1,
        job="j",
        machines=2,
        ranks_per_machine=1,
        capacity=machine.capacity,
        facts=machine.facts,
        ranks=(HeldRank(global_rank=1, slot=1, generation=1),),
    )
    actions = talk.feed(AgentSaid(connection=11, message=hello, time_ms=0))
    assert any(isinstance(action, Close) and action.connection == 1 for action in actions)
    talk.end(1, 1, 1)
    assert not talk.core.desk.ledger.ended
    talk.lose(1)
    assert machine.attached


def test_ranks_that_are_none_of_the_jobs_are_ended() -> None:
    talk = running()
    talk.hello(3, (1, 7))
    assert talk.said(Discard)[0][1].generation == 7


def test_a_leaver_that_comes_back_late_is_released_and_not_before_joiners_run() -> None:
    talk = going()
    talk.report(1, 1, Left(generation=2, boundary=9))
    talk.hello(1, (1, 1))
    assert talk.said(Release) == []
    talk.report(2, 1, Running(generation=2, iteration=9), started=2)
    talk.heard(0)
    assert talk.said(Release) == []
    talk.heard(2)
    assert [name for name, _ in talk.said(Release)] == ["m1"]
    talk.hello(1, (1, 1))
    assert [name for name, _ in talk.said(Release)] == ["m1"]


def test_after_a_restart_the_lead_is_asked_and_the_switch_finished() -> None:
    talk = going()
    talk.restart()
    assert talk.core.desk.term == 2
    talk.hello(1, (1, 1))
    assert [name for name, _ in talk.said(Query)] == ["m1"]
    talk.hello(2, (1, 2))
    talk.report(1, 1, Left(generation=2, boundary=9))
    talk.report(2, 1, Running(generation=2, iteration=9), started=2)
    assert talk.core.desk.ledger.table == ["m0", "m2"]


def test_ranks_are_told_what_is_over_when_they_attach_again() -> None:
    talk = running()
    talk.migrate("m1", to=("m2",))
    talk.end(2, 1, 2)
    talk.hello(0, (0, 1))
    assert talk.said(Abort) == [("m0", Abort(generation=2, why="it is over"))]


def test_an_agent_that_cannot_start_ranks_says_so() -> None:
    talk = running()
    talk.migrate("m1", to=("m2",))
    from megatron.resilience.protocol.controller_words import AgentSaid

    refusal = StartRefused(generation=2, why="no room")
    talk.feed(AgentSaid(connection=2, message=refusal, time_ms=0))
    assert "machine m2 refuses: no room" in talk.core.desk.ledger.incidents[2].why


def test_once_over_everybody_who_comes_is_told() -> None:
    talk = running()
    talk.end(1, 1, 1)
    talk.hello(3)
    assert [stop.ok for _, stop in talk.said(StopJob)] == [False]
    talk.ask(AskStatus())
    (status,) = talk.answers(StatusAnswer)
    assert (status.state, status.why) == ("failed", "global rank 1 on machine m1 ended: killed")
