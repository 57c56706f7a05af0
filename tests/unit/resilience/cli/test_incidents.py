"""What `trainmover incidents` shows."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from megatron.resilience.cli.incidents import paragraphs, table
from megatron.resilience.cli.main import main
from megatron.resilience.protocol.journal import AnyEntry
from tests.unit.resilience.cli.finished import BEGUN, ENDED, PREPARING, STARTED, TAKEN, make
from tests.unit.resilience.cli.test_migrate import INCIDENT


def test_each_incident_is_a_row_and_an_aborted_one_has_no_cost() -> None:
    aborted = msgspec.structs.replace(INCIDENT, incident_id="g3", outcome="aborted", why="it died", boundary=-1)
    unmeasured = msgspec.structs.replace(INCIDENT, incident_id="g4", downtime_ms=None, lost_ms=None)
    out = io.StringIO()
    Console(file=out, width=400).print(table([INCIDENT, unmeasured, aborted]))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│ g" in line]
    phases = "start joiner 812 ms, hand over 120 ms, first iteration 310 ms"
    move = "slot 1: machine-1 -> machine-4"
    assert rows == [
        ["g2", "migration", "done", move, "41", "12.3 ms", "-4.0 ms", "12 replaced, 30 kept", "4.2 MB", phases],
        [
            "g4",
            "migration",
            "done",
            move,
            "41",
            "not measured",
            "not measured",
            "12 replaced, 30 kept",
            "4.2 MB",
            phases,
        ],
        ["g3", "migration", "aborted: it died", move, "-", "-", "-", "-", "-", phases],
    ]


def test_narrow_terminals_get_whole_words_in_lines_of_their_own() -> None:
    aborted = msgspec.structs.replace(INCIDENT, incident_id="g3", outcome="aborted", why="it died " * 15, boundary=-1)
    lines = paragraphs([INCIDENT, aborted], 80)
    assert lines[:3] == [
        "g2 migration: done, at iteration 41, downtime 12.3 ms, lost -4.0 ms",
        "  slot 1: machine-1 -> machine-4, links 12 replaced, 30 kept, moved 4.2 MB",
        "  start joiner 812 ms, hand over 120 ms, first iteration 310 ms",
    ]
    assert lines[3].startswith("g3 migration: aborted: it died it died")
    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines).count("it died") == 15


@pytest.mark.parametrize(
    ("width", "shape"), [("80", r"^g2 migration: prepare links\n  slot 1: machine-1"), ("200", "┃ id ")]
)
def test_the_width_of_the_terminal_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str, shape: str
) -> None:
    monkeypatch.setattr("megatron.resilience.cli.incidents._PATIENCE_S", 0.1)
    monkeypatch.setenv("COLUMNS", width)
    make(tmp_path / "r", STARTED, TAKEN, BEGUN, PREPARING)
    assert main(["incidents", "--resilience-dir", str(tmp_path / "r")]) == 0
    said = capsys.readouterr().out
    assert re.search(shape, said)
    assert "..." not in said
    assert "…" not in said


@pytest.mark.parametrize(("entries", "outcome"), [((ENDED,), "failed"), ((), "prepare links")])
def test_incidents_are_read_from_the_journal_when_no_controller_answers(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    entries: tuple[AnyEntry, ...],
    outcome: str,
) -> None:
    monkeypatch.setattr("megatron.resilience.cli.incidents._PATIENCE_S", 0.1)
    make(tmp_path / "r", STARTED, TAKEN, BEGUN, PREPARING, *entries)
    assert main(["incidents", "--json", "--resilience-dir", str(tmp_path / "r")]) == 0
    said = capsys.readouterr()
    (incident,) = json.loads(said.out)
    assert (incident["outcome"], incident["joiners"]) == (outcome, ["machine-2"])
    assert ("as the controller does not answer" in said.err) == (not entries)
