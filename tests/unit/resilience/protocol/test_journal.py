"""The journal: written and read again, and entries that cannot follow each other are refused."""

from __future__ import annotations

import msgspec
import pytest

from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.incidents import AWAY, FIRST_ITERATION, HAND_OVER
from megatron.resilience.protocol.journal import (
    AnyEntry,
    CommandEnded,
    CommandTaken,
    JobEnded,
    JobRunning,
    JobStarted,
    JournalError,
    Ledger,
    Move,
    SwitchAborted,
    SwitchBegun,
    SwitchDone,
    SwitchGo,
    SwitchLeft,
    SwitchMeasured,
    SwitchPhase,
    SwitchWithdraw,
    decode_entry,
    encode_entry,
    incident_of,
)

MOVE = Move(slot=1, leaver="m1", joiner="m2", incarnation=3, reason="asked for")
BEGIN: list[AnyEntry] = [
    JobStarted(time_ms=0.0, machines=("m0", "m1"), incarnations=(1, 1)),
    JobRunning(time_ms=1.0, facts=Facts(torch="2"), slot_memory_bytes=9, endpoints={0: "h0:0", 1: "h1:1"}),
    CommandTaken(time_ms=2.0, command_id="c", leavers=("m1",), to=()),
    SwitchBegun(time_ms=3.0, generation=2, command_id="c", moves=(MOVE,)),
]
GO = SwitchGo(time_ms=5.0, generation=2, endpoints={1: "h2:1"})
LEFT = SwitchLeft(time_ms=6.0, generation=2, boundary=7)
DONE = SwitchDone(time_ms=8.0, generation=2)


def ledger(*entries: AnyEntry) -> Ledger:
    made = Ledger()
    for entry in [*BEGIN, *entries]:
        made.apply(decode_entry(encode_entry(entry)))
    return made


def test_a_switch_changes_the_table_when_the_lead_has_left() -> None:
    before = ledger(GO)
    assert (before.table, before.slot_generations, before.incarnations) == (["m0", "m1"], [1, 1], [1, 1])
    after = ledger(GO, LEFT)
    assert (after.table, after.slot_generations, after.incarnations) == (["m0", "m2"], [1, 2], [1, 3])
    assert (before.endpoints, after.endpoints) == ({0: "h0:0", 1: "h1:1"}, {0: "h0:0", 1: "h2:1"})
    assert after.over == 1
    assert ledger(GO, LEFT, DONE).over == 2


def test_an_aborted_generation_stays_used() -> None:
    made = ledger(SwitchAborted(time_ms=4.0, generation=2, why="x", blamed=("m2",), refused=("m2",)))
    assert (made.generation, made.over, made.switch) == (2, 2, None)
    assert made.failures == {"m2": 1}
    command = made.command("c")
    assert command is not None
    assert (command.attempts, command.refused) == (1, frozenset({"m2"}))
    with pytest.raises(JournalError, match="cannot follow"):
        made.apply(BEGIN[3])


@pytest.mark.parametrize(
    "entries",
    [
        [BEGIN[0]],
        [BEGIN[1]],
        [BEGIN[2]],
        [BEGIN[3]],
        [LEFT],
        [GO, GO],
        [GO, DONE],
        [GO, LEFT, LEFT],
        [GO, LEFT, DONE, DONE],
        [GO, LEFT, SwitchAborted(time_ms=9.0, generation=2, why="x", blamed=(), refused=())],
        [GO, LEFT, SwitchWithdraw(time_ms=9.0, generation=2, why="x", blamed=())],
        [SwitchWithdraw(time_ms=9.0, generation=2, why="x", blamed=())],
        [SwitchGo(time_ms=5.0, generation=3, endpoints={})],
        [CommandEnded(time_ms=5.0, command_id="other", ok=True, text="")],
        [JobEnded(time_ms=5.0, ok=True, why=""), JobEnded(time_ms=5.0, ok=True, why="")],
    ],
)
def test_entries_that_cannot_follow_are_refused(entries: list[AnyEntry]) -> None:
    with pytest.raises(JournalError, match="found"):
        ledger(*entries)


def test_bytes_that_are_no_entry_are_refused() -> None:
    for payload in (b"", b"x", msgspec.msgpack.encode({"entry": "SwitchGo"}), encode_entry(GO)[:-1]):
        with pytest.raises(JournalError, match="start the job anew"):
            decode_entry(payload)


def test_the_incident_is_made_from_what_is_written_down() -> None:
    made = ledger(SwitchPhase(time_ms=4.0, generation=2, phase="prepare leaver"), GO, LEFT)
    assert made.switch is not None
    incident = incident_of(made.switch, outcome="done", end_ms=8.0, boundary=7)
    assert [(phase.name, phase.start_ms, phase.duration_ms) for phase in incident.phases] == [
        ("start joiner", 3.0, 1.0),
        ("prepare leaver", 4.0, 1.0),
        ("wait for boundary, hand over", 5.0, 1.0),
        ("first iteration", 6.0, 2.0),
    ]
    assert [phase.overlapped for phase in incident.phases] == [True, True, False, False]
    assert (incident.leavers, incident.joiners, incident.slots) == (("m1",), ("m2",), (1,))
    measured = ledger(GO, LEFT, DONE, SwitchMeasured(time_ms=9.0, generation=2, incident=incident))
    assert measured.incidents == {2: incident}
    assert measured.switch is None


def at(time_ms: float, phase: str) -> SwitchPhase:
    return SwitchPhase(time_ms=time_ms, generation=2, phase=phase)


def test_phases_in_which_training_stops_are_told_from_those_that_overlap_with_it() -> None:
    made = ledger(GO, at(5.5, HAND_OVER), LEFT, at(7.0, "tell all machines"), DONE)
    assert made.switch is not None
    phases = incident_of(made.switch, outcome="done", end_ms=9.0).phases
    assert [(phase.name, phase.duration_ms) for phase in phases if not phase.overlapped] == [
        (HAND_OVER, 0.5),
        (FIRST_ITERATION, 1.0),
    ]
    assert [phase.name for phase in phases if phase.overlapped] == [
        "start joiner",
        "wait for boundary",
        "tell all machines",
        "measure",
    ]


def test_a_phase_in_which_the_controller_was_away_says_so_once() -> None:
    made = ledger(GO, at(5.5, HAND_OVER), LEFT, at(9.0, AWAY), at(9.5, AWAY), at(10.0, "tell all machines"))
    assert made.switch is not None
    *_, first, _ = incident_of(made.switch, outcome="done", end_ms=11.0).phases
    assert (first.name, first.duration_ms, first.overlapped) == ("first iteration, controller away", 4.0, False)


def test_commands_are_answered_from_the_journal() -> None:
    ended = CommandEnded(time_ms=5.0, command_id="c", ok=False, text="no")
    made = ledger(SwitchAborted(time_ms=4.0, generation=2, why="x", blamed=(), refused=()), ended)
    assert made.queue == []
    assert made.answers == {"c": ended}
    with pytest.raises(JournalError):
        made.apply(BEGIN[2])
