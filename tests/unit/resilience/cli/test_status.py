"""What `trainmover status` shows."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from megatron.resilience.cli.main import main
from megatron.resilience.cli.status import as_json, table
from megatron.resilience.protocol.messages import MachineView, StatusAnswer
from tests.unit.resilience.cli.finished import ENDED, STARTED, make

STATUS = StatusAnswer(
    job="night",
    state="running",
    why="",
    term=2,
    generation=3,
    iteration=120,
    median_iteration_ms=310.4,
    machines=(
        MachineView(
            machine_id="machine-0", incarnation=1, rack="r1", attached=True, slot=0, generation=3, state="leaving"
        ),
        MachineView(
            machine_id="machine-9", incarnation=1, rack="", attached=False, slot=None, generation=0, state="free"
        ),
    ),
    switch="prepare links",
    queued=("abc",),
)


def test_table_names_machines_slots_and_what_moves() -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(table(STATUS))
    said = out.getvalue()
    assert "job night: running, iteration 120, 310 ms each; generation 3, controller's term 2" in said
    assert "a switch is under way: prepare links" in said
    assert "1 further migrations wait" in said
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if "machine-" in line]
    assert rows == [
        ["machine-0", "0", "3", "leaving", "connected", "r1"],
        ["machine-9", "-", "-", "free", "away", "-"],
    ]


def test_json_has_plain_values_and_no_field_of_the_wire() -> None:
    plain = as_json(STATUS)
    assert plain["machines"][1]["slot"] is None
    assert plain["iteration"] == 120
    assert "message" not in plain


def test_status_of_a_job_that_is_over_is_read_from_its_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    make(tmp_path / "r", STARTED, ENDED)
    assert main(["status", "--resilience-dir", str(tmp_path / "r")]) == 0
    said = capsys.readouterr().out
    assert "job night: failed; generation 1\n" in said
    assert re.search(r"the job failed at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, exit 1: global rank 1 on machine", said)
    assert main(["status", "--json", "--resilience-dir", str(tmp_path / "r")]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["job"], status["state"]) == ("night", "failed")
    assert [(one["machine_id"], one["slot"]) for one in status["machines"]] == [("machine-0", 0), ("machine-1", 1)]


def test_job_that_may_still_run_is_not_said_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.resilience.cli.status._PATIENCE_S", 0.1)
    make(tmp_path / "r", STARTED)
    assert main(["status", "--resilience-dir", str(tmp_path / "r")]) == 1
    said = capsys.readouterr().err
    assert "no controller at" in said
    assert "if the job still runs, it trains on without" in said
