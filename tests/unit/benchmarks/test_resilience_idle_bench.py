"""The benchmark of idle resilience: what it compares with what, and a file that follows its schema."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks import resilience_idle_bench
from benchmarks.resilience_idle_bench import WARM_UP, compare, main, verdict
from benchmarks.resilience_idle_job import is_on
from benchmarks.training_bench import ROOT
from megatron.resilience.agent.driven_run import RunError

RIGHT = {"iterations": 400, "off_cpu_ms": 300.0, "on_cpu_ms": 301.0, "overhead": 0.0033}


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    text = json.loads((ROOT / "docs" / "schemas" / "resilience_idle.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(text)
    return jsonschema.Draft202012Validator(text)


def times(iterations: int, on_ms: float, *, drift_ms: float = 0.0, warm_up_ms: float = 500.0) -> list[list[float]]:
    """Of two ranks; off takes 100 ms on each, and all grow slower by `drift_ms` an iteration."""
    return [
        [
            warm_up_ms if iteration <= WARM_UP else (on_ms if is_on(iteration) else 100.0) + drift_ms * iteration
            for iteration in range(1, iterations + 1)
        ]
        for _ in range(2)
    ]


def test_every_second_iteration_is_on() -> None:
    assert [is_on(iteration) for iteration in (1, 2, 3, 4)] == [False, True, False, True]


def test_overhead_is_of_the_whole_job_without_its_first_iterations() -> None:
    assert compare(times(60, 102.0)) == {"iterations": 60, "off_cpu_ms": 200.0, "on_cpu_ms": 204.0, "overhead": 0.02}
    assert compare(times(60, 99.0))["overhead"] == -0.01


def test_a_computer_that_grows_slower_is_no_overhead() -> None:
    assert compare(times(60, 100.0, drift_ms=1.0))["overhead"] == pytest.approx(0.0, abs=0.01)


def test_the_aim_is_met_or_missed() -> None:
    assert verdict(RIGHT) == "met    CPU time of an idle iteration: +0.33% (aim: at most 1%)"
    assert verdict({**RIGHT, "overhead": 0.0101}).startswith("MISSED")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def nowhere() -> Iterator[Path]:
        yield Path("nowhere")

    monkeypatch.setattr(resilience_idle_bench, "nothing_left", nowhere)


@pytest.mark.usefixtures("folder")
def test_the_file_follows_the_schema(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, schema: jsonschema.Draft202012Validator
) -> None:
    monkeypatch.setattr(resilience_idle_bench, "run", lambda _, iterations: times(iterations, 101.0))
    assert main(["--iterations", "50", "--output", str(tmp_path / "idle.json")]) == 0
    result = json.loads((tmp_path / "idle.json").read_text(encoding="utf-8"))
    schema.validate(result)
    assert result["overhead"] == 0.01


@pytest.mark.usefixtures("folder")
def test_a_run_that_failed_gives_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(*_: Any) -> Any:
        raise RunError("found exit code 1, expected 0")

    monkeypatch.setattr(resilience_idle_bench, "run", run)
    assert main(["--output", str(tmp_path / "idle.json")]) == 1
    assert "resilience_idle_bench: found exit code 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [{}, {**RIGHT, "off_cpu_ms": 0}, {**RIGHT, "iterations": 1.5}, {**RIGHT, "x": 1}])
def test_the_schema_refuses_other_results(schema: jsonschema.Draft202012Validator, wrong: Any) -> None:
    schema.validate(RIGHT)
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(wrong)
