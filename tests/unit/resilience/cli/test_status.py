"""What `trainmover status` shows."""

from __future__ import annotations

import io

from rich.console import Console

from megatron.resilience.cli.status import as_json, table
from megatron.resilience.protocol.messages import MachineView, StatusAnswer

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
