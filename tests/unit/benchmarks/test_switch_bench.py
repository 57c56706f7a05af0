"""The benchmark of migrations and restarts: its figures, its aims, and a file that follows its schema."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks import switch_bench
from benchmarks.switch_bench import RANKS, RESTARTED, SETTLE, Taken, arguments, judge, loopback_bytes_per_ms, main
from benchmarks.training_bench import ROOT
from megatron.resilience.agent.driven_run import RunError
from megatron.resilience.baselines.timeline import MEDIAN_OVER

RIGHT = {
    "median_iteration_ms": 180.0,
    "downtime_ms": [-3.0, 50.5],
    "lost_ms": [12.0, 90.0],
    "restart_downtime_ms": 9000.0,
    "restart_warm_fork_downtime_ms": 6000.0,
    "ratio": 379.0,
    "verdicts": {"ratio": "met", "median": "met", "worst": "MISSED"},
}


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    text = json.loads((ROOT / "docs" / "schemas" / "switch.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(text)
    return jsonschema.Draft202012Validator(text)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What was measured, in order; the n-th figure of a kind is n times its first."""
    done: list[str] = []

    @contextlib.contextmanager
    def folder() -> Iterator[Path]:
        yield tmp_path_factory.mktemp("runs")

    def migrations(place: Path, taken: Taken) -> None:
        done.append("migrations")
        count = done.count("migrations")
        taken.iteration_ms.append(100.0 * count)
        taken.downtime_ms += [10.0 * count, 20.0 * count]
        taken.lost_ms += [30.0, 40.0]
        taken.bytes_moved += [1000, 1000]

    def restart(place: Path, start: str, taken: Taken) -> None:
        done.append(start)
        taken.restart_ms[start].append({"exec": 9000.0, "fork": 6000.0}[start] * done.count(start))

    monkeypatch.setattr(switch_bench, "nothing_left", folder)
    monkeypatch.setattr(switch_bench, "migrations", migrations)
    monkeypatch.setattr(switch_bench, "restart", restart)
    monkeypatch.setattr(switch_bench, "loopback_bytes_per_ms", lambda: 1000.0)
    return done


def test_migrations_and_restarts_take_turns_and_the_file_follows_the_schema(
    turns: list[str], tmp_path: Path, schema: jsonschema.Draft202012Validator
) -> None:
    assert main(["--output", str(tmp_path / "new" / "switch.json")]) == 0
    assert turns == ["migrations", "exec", "fork"] * switch_bench.ROUNDS
    result = json.loads((tmp_path / "new" / "switch.json").read_text(encoding="utf-8"))
    schema.validate(result)
    assert result["median_iteration_ms"] == 150.0
    assert result["downtime_ms"] == [10.0, 20.0, 20.0, 40.0]
    assert (result["restart_downtime_ms"], result["restart_warm_fork_downtime_ms"]) == (13500.0, 9000.0)
    assert result["ratio"] == 675.0, "medians of 13500 and 20"
    assert result["verdicts"] == {"ratio": "met", "median": "met", "worst": "met"}


def test_the_worst_migration_is_judged_and_an_error_if_asked_for(
    turns: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = switch_bench.migrations

    def migrations(place: Path, taken: Taken) -> None:
        measured(place, taken)
        taken.downtime_ms[-1] = 900.0

    monkeypatch.setattr(switch_bench, "migrations", migrations)
    path = tmp_path / "switch.json"
    assert main(["--quick", "--output", str(path)]) == 0
    assert main(["--quick", "--output", str(path), "--strict"]) == 1
    assert "MISSED worst downtime 900.0 ms" in capsys.readouterr().out
    assert json.loads(path.read_text(encoding="utf-8"))["verdicts"]["worst"] == "MISSED"


def test_the_bound_has_the_bytes_of_one_rank() -> None:
    taken = Taken(iteration_ms=[100.0], downtime_ms=[1.0], lost_ms=[1.0], bytes_moved=[8_000_000] * 3)
    assert RANKS == 2
    assert taken.rank_bytes() == 4_000_000


def test_a_downtime_that_cannot_be_seen_is_not_divided_by() -> None:
    taken = Taken(iteration_ms=[100.0], downtime_ms=[-9.0, 0.0, 4.0], lost_ms=[1.0], bytes_moved=[1])
    taken.restart_ms = {"exec": [9000.0], "fork": [6000.0]}
    assert taken.result()["ratio"] == 9000.0
    assert taken.result()["downtime_ms"] == [-9.0, 0.0, 4.0]


def test_a_run_that_failed_gives_no_file(
    turns: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def restart(*_: Any) -> None:
        raise RunError("found exit code 1, expected 0")

    monkeypatch.setattr(switch_bench, "restart", restart)
    assert main(["--quick", "--output", str(tmp_path / "switch.json")]) == 1
    assert "switch_bench: found exit code 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "marks"),
    [
        ({}, ["met", "met", "met"]),
        ({"ratio": 49.9}, ["MISSED", "met", "met"]),
        ({"downtime_ms": [189.0, 190.0, 190.0]}, ["met", "met", "met"]),
        ({"downtime_ms": [190.0, 191.0, 192.0]}, ["met", "MISSED", "MISSED"]),
        ({"downtime_ms": [189.0, 190.0, 900.0]}, ["met", "met", "MISSED"]),
    ],
)
def test_aims_are_met_or_missed(changed: dict[str, Any], marks: list[str]) -> None:
    # 180 ms of an iteration, and 10 ms for 5 MB at 0.5 MB/ms.
    verdicts, lines = judge({**RIGHT, **changed}, 5e6, 0.5e6)
    assert list(verdicts.values()) == [line.split()[0] for line in lines] == marks
    assert all("aim: at most 190.0" in line for line in lines[1:])


def test_medians_are_of_whole_windows() -> None:
    assert SETTLE > MEDIAN_OVER
    assert RESTARTED > SETTLE + 5
    assert arguments(77)[-2:] == ("--train-iters", "77")


def test_the_speed_of_loopback_is_that_of_this_computer() -> None:
    speed = loopback_bytes_per_ms(16 << 20)
    assert 10_000 < speed < 1e9, "between 10 MB/s and 1 TB/s"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {**RIGHT, "downtime_ms": []},
        {**RIGHT, "downtime_ms": 3.0},
        {**RIGHT, "restart_downtime_ms": 0},
        {**RIGHT, "more": 1},
        {**RIGHT, "verdicts": {"ratio": "met", "median": "met"}},
        {**RIGHT, "verdicts": {"ratio": "met", "median": "met", "worst": "perhaps"}},
        [RIGHT],
    ],
)
def test_the_schema_refuses_other_results(schema: jsonschema.Draft202012Validator, wrong: Any) -> None:
    schema.validate(RIGHT)
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(wrong)
