"""The benchmark of idle resilience: what it compares with what, and a file that follows its schema."""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks import resilience_idle_bench
from benchmarks.resilience_idle_bench import Times, interval, judge, main, result_of
from benchmarks.resilience_idle_job import WARM_UP, cpu_ticks, is_on, others_cpu_ms
from benchmarks.training_bench import ROOT
from megatron.resilience.agent.driven_run import RunError

RIGHT = {
    "iterations": 400,
    "off_cpu_ms": 300.0,
    "on_cpu_ms": 301.0,
    "overhead": 0.0033,
    "overhead_interval": [-0.001, 0.0061],
    "control_cpu_ms": 1.5,
    "overhead_with_control": 0.0083,
    "off_wall_ms": 150.0,
    "on_wall_ms": 150.3,
    "wall_overhead": 0.002,
    "wall_overhead_interval": [-0.01, 0.02],
}


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    text = json.loads((ROOT / "docs" / "schemas" / "resilience_idle.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(text)
    return jsonschema.Draft202012Validator(text)


def times(iterations: int, on_ms: float, *, drift_ms: float = 0.0, warm_up_ms: float = 500.0) -> Times:
    """Of two ranks; off takes 100 ms on each, all grow slower by `drift_ms` an iteration; others take 1 ms in each."""
    one = [
        warm_up_ms if iteration <= WARM_UP else (on_ms if is_on(iteration) else 100.0) + drift_ms * iteration
        for iteration in range(1, iterations + 1)
    ]
    slower = [2 * value for value in one]
    return Times(cpu_ms=[one, one], wall_ms=[one, slower], others_cpu_ms=1.0 * (iterations - WARM_UP))


def test_every_second_iteration_is_on() -> None:
    assert [is_on(iteration) for iteration in (1, 2, 3, 4)] == [False, True, False, True]


def test_overhead_is_of_the_whole_job_without_its_first_iterations() -> None:
    assert result_of(times(60, 102.0)) == {
        "iterations": 60,
        "off_cpu_ms": 200.0,
        "on_cpu_ms": 204.0,
        "overhead": 0.02,
        "overhead_interval": [0.02, 0.02],
        "control_cpu_ms": 1.0,
        "overhead_with_control": 0.025,
        "off_wall_ms": 200.0,
        "on_wall_ms": 204.0,
        "wall_overhead": 0.02,
        "wall_overhead_interval": [0.02, 0.02],
    }
    assert result_of(times(60, 99.0))["overhead"] == -0.01


def test_a_computer_that_grows_slower_is_no_overhead() -> None:
    assert result_of(times(60, 100.0, drift_ms=1.0))["overhead"] == pytest.approx(0.0, abs=0.01)


def test_an_interval_holds_the_median_and_grows_with_the_noise() -> None:
    chance = random.Random(1)
    quiet, loud = ([5.0 + chance.gauss(0, width) for _ in range(400)] for width in (1.0, 10.0))
    (low, high), (lower, higher) = interval(quiet), interval(loud)
    assert low < statistics.median(quiet) < high
    assert low < 5.0 < high
    assert higher - lower > 4 * (high - low) > 0
    assert interval(quiet) == (low, high), "the same figures give the same interval"
    assert interval([3.0, 3.0]) == (3.0, 3.0)


def test_aims_are_met_or_missed() -> None:
    assert judge(RIGHT) == [
        "met    CPU time of an idle iteration on all ranks: +0.33%, between -0.10% and +0.61% (aim: at most 1%)",
        "met    the same with controller, agents, spawners and launcher: +0.83% (aim: at most 1%)",
        "met    time of an idle iteration on the wall: +0.20%, between -1.00% and +2.00% (aim: at most 1%)",
    ]
    for place, name in enumerate(("overhead", "overhead_with_control", "wall_overhead")):
        marks = [line.split()[0] for line in judge({**RIGHT, name: 0.0101})]
        assert marks == ["MISSED" if number == place else "met" for number in range(3)]


def test_processor_time_is_that_of_user_and_kernel() -> None:
    assert cpu_ticks("7 (a name) with ) S 1 7 7 0 -1 4194560 100 0 0 0 30 12 5 6 20 0 1 0 9 1 2") == 42


def test_ranks_are_not_counted_among_the_others() -> None:
    def burns() -> subprocess.Popen[bytes]:
        code = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\nimport sys; sys.stdin.read()"
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    started = [burns(), burns()]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
        both = others_cpu_ms(os.getpid(), [])
        one = others_cpu_ms(os.getpid(), [started[0].pid])
        assert both - one >= 190
        assert one >= 190
    finally:
        for process in started:
            process.communicate()


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
    words = ["--iterations", "50", "--output", str(tmp_path / "idle.json"), "--strict"]
    assert main(words) == 1, "1.5 % with the controller"


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


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {**RIGHT, "off_cpu_ms": 0},
        {**RIGHT, "iterations": 1.5},
        {**RIGHT, "x": 1},
        {**RIGHT, "overhead_interval": [1]},
    ],
)
def test_the_schema_refuses_other_results(schema: jsonschema.Draft202012Validator, wrong: Any) -> None:
    schema.validate(RIGHT)
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(wrong)
