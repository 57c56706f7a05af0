"""What users are told: refusals, the queue, duplicates, the next candidate, results, status and incidents."""

from __future__ import annotations

import pytest

from megatron.resilience.protocol.controller_words import UserLost
from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.journal import CommandEnded, CommandTaken, SwitchBegun
from megatron.resilience.protocol.messages import (
    Accepted,
    AskIncidents,
    AskStatus,
    AtBoundary,
    Finished,
    IncidentsAnswer,
    Left,
    Measured,
    ProgressLine,
    Refused,
    Running,
    StatusAnswer,
)
from tests.unit.resilience.protocol.controller_talk import Talk, going, running


def finish(talk: Talk, generation: int = 2, downtimes_ms: tuple[float | None, ...] = (3.0, 5.0)) -> None:
    talk.report(1, 1, AtBoundary(generation=generation))
    talk.report(1, 1, Left(generation=generation, boundary=9, peak_bytes=700))
    talk.report(2, 1, Running(generation=generation, iteration=9), started=generation)
    talk.heard(0, 2)
    places = ((0, 0, 1), (2, 1, generation))
    for (machine, rank, started), downtime_ms in zip(places, downtimes_ms, strict=True):
        measured = Measured(
            generation=generation,
            boundary=9,
            downtime_ms=downtime_ms,
            lost_ms=1.0,
            median_iteration_ms=10.0,
            links_replaced=1,
            memory_before_bytes=0 if started == generation else 40,
            memory_after_bytes=44,
            peak_bytes=600,
        )
        talk.report(machine, rank, measured, started=started)


def test_a_migration_is_told_from_beginning_to_end() -> None:
    talk = going()
    finish(talk)
    (done,) = talk.answers(Finished)
    assert done.ok
    assert done.text == "slot 1 from m1 to m2 at iteration 9, downtime 5.0 ms"
    assert done.incident is not None
    assert (done.incident.downtime_ms, done.incident.links_replaced, done.incident.boundary) == (5.0, 2, 9)
    assert (done.incident.memory_change_bytes, done.incident.stayers_compared) == (4, 1)
    assert done.incident.peaks_bytes == {1: (700, 600)}
    names = [phase.name for phase in done.incident.phases]
    assert names == [
        "start joiner", "prepare leaver", "prepare links", "wait for boundary", "hand over", "first iteration",
        "tell all machines", "measure",
    ]  # fmt: skip
    assert [phase.name for phase in done.incident.phases if not phase.overlapped] == ["hand over", "first iteration"]


def test_a_downtime_that_nobody_could_measure_is_not_told_as_none_at_all() -> None:
    talk = going()
    finish(talk, downtimes_ms=(None, None))
    (done,) = talk.answers(Finished)
    assert done.text == "slot 1 from m1 to m2 at iteration 9, downtime not measured"
    assert done.incident is not None
    assert (done.incident.downtime_ms, done.incident.links_replaced) == (None, 2)


def test_costs_are_not_waited_for_too_long() -> None:
    talk = going()
    talk.report(1, 1, Left(generation=2, boundary=9))
    talk.report(2, 1, Running(generation=2, iteration=9), started=2)
    talk.heard(0, 2)
    assert talk.answers(Finished) == []
    talk.wait(150)
    (done,) = talk.answers(Finished)
    assert done.incident is not None
    assert done.incident.ranks_measured == 0


@pytest.mark.parametrize(
    ("leavers", "to", "why"),
    [
        (("m9",), (), "machine m9 is unknown; known machines: m0, m1, m2, m3"),
        (("m2",), (), "machine m2 holds no slot; slots are held by m0, m1"),
        (("m1",), ("m0",), "it holds slot 0"),
        (("m1",), ("m7",), "machine m7 is unknown"),
        (("m1", "m1"), (), "machine m1 is named twice"),
        (("m0", "m1"), ("m2",), "found 1 --to for 2 --from"),
        ((), (), "expected at least one --from"),
    ],
)
def test_what_cannot_be_is_refused_plainly(leavers: tuple[str, ...], to: tuple[str, ...], why: str) -> None:
    talk = running()
    before = list(talk.entries)
    talk.migrate(*leavers, to=to)
    (refused,) = talk.answers(Refused)
    assert why in refused.why
    assert talk.entries == before


def test_a_job_that_is_not_running_or_over_refuses() -> None:
    talk = Talk()
    talk.hello(0)
    talk.migrate("m0")
    assert "not running yet" in talk.answers(Refused)[0].why
    talk = running()
    talk.end(1, 1, 1)
    talk.migrate("m1")
    assert "the job is over" in talk.answers(Refused)[0].why


def test_the_same_command_twice_is_one() -> None:
    talk = going()
    talk.migrate("m1")
    assert talk.answers(Accepted)
    assert sum(isinstance(entry, CommandTaken) for entry in talk.entries) == 1
    finish(talk)
    talk.migrate("m1")
    assert talk.answers(Finished)[0].ok, "asked after its end, it is told its result again"
    assert sum(isinstance(entry, SwitchBegun) for entry in talk.entries) == 1


def test_a_second_migration_waits_for_its_turn() -> None:
    talk = going()
    talk.migrate("m0", command_id="c2")
    assert talk.answers(Accepted)[0].text == "queued behind 1 other migration"
    talk.ask(AskStatus())
    assert talk.answers(StatusAnswer)[0].queued == ("c2",)
    finish(talk)
    begun = [entry for entry in talk.entries if isinstance(entry, SwitchBegun)]
    assert [entry.command_id for entry in begun] == ["c1", "c2"]
    assert begun[1].generation == 3


def test_a_second_migration_of_a_slot_under_way_finds_it_gone() -> None:
    talk = going()
    talk.migrate("m1", command_id="c2")
    assert talk.answers(Accepted)
    finish(talk)
    told = [finished for finished in talk.answers(Finished) if finished.command_id == "c2"]
    assert told == [] or not told[0].ok
    assert talk.core.desk.ledger.answers["c2"].text.startswith("machine m1 holds no slot any more")


def test_another_model_refuses_the_joiner_and_the_next_is_taken() -> None:
    talk = running()
    talk.migrate("m1")
    talk.build(2, 1, 2, Facts(torch="2", model_digest="other"))
    begun = [entry for entry in talk.entries if isinstance(entry, SwitchBegun)]
    assert [(entry.generation, entry.moves[0].joiner) for entry in begun] == [(2, "m2"), (3, "m3")]
    talk.build(3, 1, 3, Facts(torch="2", model_digest="other"))
    (told,) = talk.answers(Finished)
    assert not told.ok
    assert "it was refused before" in told.text
    assert "model configuration: found other, the job runs d" in told.text


def test_tries_are_bounded() -> None:
    talk = running()
    talk.migrate("m1")
    for generation in range(2, 9):
        drive = talk.core.commands.drive
        if drive is None:
            break
        machine = int(drive.moves[0].joiner[1:])
        talk.build(machine, 1, generation)
        talk.end(machine, 1, generation)
    assert talk.core.desk.ledger.answers["c1"].text.startswith("given up after 5 tries")


def test_no_try_begins_while_the_leavers_agent_is_away() -> None:
    talk = running()
    talk.lose(1)
    talk.migrate("m1")
    away = "the agent of m1, which is to leave, is away"
    assert [line.text for line in talk.answers(ProgressLine)] == [f"waiting: {away}"]
    talk.wait(1_000)
    assert talk.answers(ProgressLine) == []
    talk.ask(AskStatus())
    assert talk.answers(StatusAnswer)[0].switch == away
    talk.hello(1, (1, 1))
    assert isinstance(talk.entries[-1], SwitchBegun)
    talk = running()
    talk.lose(1)
    talk.migrate("m1")
    talk.wait(60_000)
    (told,) = talk.answers(Finished)
    assert (told.ok, told.text) == (False, away)
    assert not any(isinstance(entry, SwitchBegun) for entry in talk.entries)


def test_users_who_left_are_not_answered() -> None:
    talk = going()
    talk.feed(UserLost(client=9, time_ms=0))
    talk.report(1, 1, Left(generation=2, boundary=9))
    assert talk.answers(ProgressLine) == []


def test_status_shows_who_does_what() -> None:
    talk = going()
    talk.ask(AskStatus())
    (status,) = talk.answers(StatusAnswer)
    assert [(view.machine_id, view.slot, view.state) for view in status.machines] == [
        ("m0", 0, "training"),
        ("m1", 1, "leaving"),
        ("m2", None, "joining"),
        ("m3", None, "free"),
    ]
    assert (status.state, status.switch, status.generation) == ("running", "wait for boundary", 2)


def test_incidents_show_the_one_under_way() -> None:
    talk = going()
    talk.ask(AskIncidents())
    (answer,) = talk.answers(IncidentsAnswer)
    assert [(one.incident_id, one.outcome, one.boundary) for one in answer.incidents] == [
        ("g2", "wait for boundary", -1)
    ]
    finish(talk)
    talk.ask(AskIncidents())
    assert talk.answers(IncidentsAnswer)[0].incidents[0].outcome == "done"


def test_a_command_whose_switch_was_done_is_answered_so_although_the_job_ended_while_no_controller_was_there() -> None:
    talk = going()
    finish(talk)
    assert isinstance(talk.entries[-1], CommandEnded)
    talk.entries.pop()
    talk.restart()
    talk.hello(0, (0, 1), term=1)
    talk.hello(2, (1, 2), term=1)
    for machine, rank, generation in ((0, 0, 1), (2, 1, 2)):
        talk.end(machine, rank, generation, code=0)
    ended = [entry for entry in talk.entries if isinstance(entry, CommandEnded)]
    assert [(entry.ok, entry.text) for entry in ended] == [
        (True, "slot 1 from m1 to m2 at iteration 9, downtime 5.0 ms")
    ]
    assert talk.core.desk.ledger.ended_ok
