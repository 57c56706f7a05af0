"""What is written follows the schema, and the tables show what was measured."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from benchmarks.collectives.cells import DIRECT, GLOO, LIBRARIES, OPENMPI, OPS, SUBJECTS, TRAINMOVER, TRAINMOVER_TCP
from benchmarks.collectives.job import ROOT
from benchmarks.collectives.measure import Rates
from benchmarks.collectives.report import WIDTH, records, show, write
from tests.unit.benchmarks.conftest import MakeRow

RIGHT = {
    "op": "broadcast",
    "ranks": 2,
    "bytes": 1024,
    "library": "gloo",
    "median_us": 3.5,
    "best_us": 3,
    "busbw_gbps": 0.3,
}


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    text = json.loads((ROOT / "docs" / "schemas" / "collectives.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(text)
    return jsonschema.Draft202012Validator(text)


def test_what_is_written_follows_the_schema(
    tmp_path: Path, make_row: MakeRow, schema: jsonschema.Draft202012Validator
) -> None:
    path = tmp_path / "new" / "collectives.json"
    rows = [make_row(subject, 1e7, op=op, size=1 << 10) for subject in SUBJECTS for op in OPS]
    write(rows, path)
    written = json.loads(path.read_text(encoding="utf-8"))
    schema.validate(written)
    assert len(written) == len(rows)
    assert list(path.parent.iterdir()) == [path]
    assert {row["library"] for row in written} == set(LIBRARIES)


def test_every_field_is_the_rows_own(make_row: MakeRow) -> None:
    assert records([make_row(OPENMPI, 1000, op="all_gather", ranks=4, size=4 << 20)]) == [
        {
            "op": "all_gather",
            "ranks": 4,
            "bytes": 4 << 20,
            "library": "openmpi",
            "median_us": 1000,
            "best_us": 900,
            "busbw_gbps": 3.146,
            "transport": "shm",
        }
    ]


def test_of_two_transports_the_last_one_written_is_the_machines_memory(make_row: MakeRow) -> None:
    rows = [make_row(TRAINMOVER, 10), make_row(GLOO, 50), make_row(TRAINMOVER_TCP, 30)]
    by_library = {record["library"]: record["median_us"] for record in records(rows)}
    assert by_library == {"trainmover": 10, "gloo": 50}


@pytest.mark.parametrize(
    "change",
    [
        {"op": "all_to_all"},
        {"library": "nccl"},
        {"transport": "rdma"},
        {"ranks": 1},
        {"bytes": 0.5},
        {"median_us": 0},
        {"best_us": None},
        {"busbw_gbps": "0.3"},
        {"note": "one field too many"},
    ],
)
def test_the_schema_refuses_other_rows(schema: jsonschema.Draft202012Validator, change: dict[str, Any]) -> None:
    schema.validate([RIGHT, {**RIGHT, "transport": "tcp"}])
    with pytest.raises(jsonschema.ValidationError):
        schema.validate([RIGHT, {**RIGHT, **change}])


@pytest.mark.parametrize("missing", sorted(RIGHT))
def test_the_schema_asks_for_every_field(schema: jsonschema.Draft202012Validator, missing: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        schema.validate([{name: value for name, value in RIGHT.items() if name != missing}])


def test_the_schema_refuses_no_rows_at_all(schema: jsonschema.Draft202012Validator) -> None:
    nothing: list[Any] = [[], {}, RIGHT]
    for wrong in nothing:
        with pytest.raises(jsonschema.ValidationError):
            schema.validate(wrong)


def shown(rows: list[Any], rates: dict[int, Rates]) -> str:
    text = io.StringIO()
    show(rows, rates, Console(file=text, width=WIDTH))
    return text.getvalue()


def test_tables_verdicts_and_rates_are_shown(make_row: MakeRow) -> None:
    rows = [make_row(GLOO, 8000), make_row(TRAINMOVER, 1000), make_row(TRAINMOVER_TCP, 4000)]
    rows += [make_row(DIRECT, 990), make_row(OPENMPI, 500)]
    text = shown(rows, {8: Rates(cores=2, reduce=14e9, copy=13e9)})
    (line,) = [line for line in text.splitlines() if "8000 (0.23)" in line and "Open MPI" not in line and "990" in line]
    words = "all_reduce | 8 | 1 MB | 8000 (0.23) | 1000 (1.84) | 8.00 | 990 (1.85) | 500 (3.67) | 0.51"
    assert [word.strip() for word in line.strip("│").split("│")] == words.split(" | ")
    assert "4000 (0.46) │   2.00" in text, "the second table is over tcp"
    assert "met    trainmover against gloo: 8.00x" in text
    assert "MISSED trainmover-direct against Open MPI: 0.51x" in text
    assert "each y += x at 14.0 GB/s and y = x at 13.0 GB/s" in text


def test_what_was_not_measured_is_a_dash(make_row: MakeRow) -> None:
    text = shown([make_row(GLOO, 8000)], {})
    (line,) = [line for line in text.splitlines() if "8000" in line]
    assert line.replace("│", " ").split()[6:] == ["-"] * 5
    assert "TCP on loopback" not in text
