"""The benchmark reads what the trainer writes, and writes what its schema says."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks import training_bench
from benchmarks.training_bench import (
    ITERATIONS,
    KINDS,
    ROOT,
    Kind,
    RunError,
    command,
    iteration_ms,
    main,
    measure,
    ratios,
)

RIGHT = {"gloo_ms": 280.5, "trainmover_ms": 180.0, "compute_only_ms": 150.0}


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    text = json.loads((ROOT / "docs" / "schemas" / "training.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(text)
    return jsonschema.Draft202012Validator(text)


def ended(code: int, iterations: int, each_ms: float = 300.0) -> subprocess.CompletedProcess[str]:
    line = f"elapsed time per iteration (ms): {each_ms} | lm\n"
    return subprocess.CompletedProcess([], code, stdout=line * iterations + "last words\n")


def test_elapsed_times_are_found_in_the_log() -> None:
    line = "[rank 7]  [2026-01-01 00:00:00.0] iteration        1/     2 | elapsed time per iteration (ms): 312.4 | lm"
    assert iteration_ms(f"{line}\nprogress: 1/2 iterations\n{line.replace('312.4', '99.0')}") == [312.4, 99.0]


def test_only_computing_alone_is_isolated() -> None:
    commands = {kind.name: command(kind) for kind in KINDS}
    assert [name for name, words in commands.items() if "TRAINMOVER_MODE=isolated" in words] == ["compute_only_ms"]
    assert commands["gloo_ms"][-2:] == ["--distributed-backend", "gloo"]
    assert commands["trainmover_ms"][-2:] == ["--distributed-backend", "trainmover"]


@pytest.mark.parametrize(("code", "iterations"), [(1, ITERATIONS), (0, ITERATIONS - 1)])
def test_a_run_that_failed_gives_no_figure(monkeypatch: pytest.MonkeyPatch, code: int, iterations: int) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended(code, iterations))
    with pytest.raises(RunError, match=f"exit code {code} and {iterations} iterations, expected 0(.|\n)*last words"):
        measure(KINDS[0])


def test_the_first_iterations_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of all 25 the median would be 300; of the 17 that count it is 200.
    parts = [(training_bench.WARM_UP, 9000.0), (9, 200.0), (8, 300.0)]
    both = subprocess.CompletedProcess([], 0, stdout="".join(ended(0, *part).stdout for part in parts))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: both)
    assert measure(KINDS[0]) == 200


def test_ratios_say_whether_an_aim_is_met() -> None:
    assert ratios(RIGHT) == [
        "met    trainmover_ms / compute_only_ms = 1.20 (aim: at most 1.25)",
        "met    trainmover_ms / gloo_ms = 0.64 (aim: at most 0.72)",
    ]
    assert [line[:6] for line in ratios({**RIGHT, "trainmover_ms": 250.0})] == ["MISSED", "MISSED"]
    assert ratios({"gloo_ms": 280.0}) == []


def test_the_kinds_take_turns_and_the_file_follows_the_schema(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, schema: jsonschema.Draft202012Validator
) -> None:
    turns: list[str] = []

    def measured(kind: Kind) -> float:
        turns.append(kind.name)
        return float(len(turns))

    monkeypatch.setattr(training_bench, "nothing_left", contextlib.nullcontext)
    monkeypatch.setattr(training_bench, "measure", measured)
    assert main(["--output", str(tmp_path / "new" / "training.json")]) == 0
    names = [kind.name for kind in KINDS]
    assert turns == names * training_bench.ROUNDS
    result = json.loads((tmp_path / "new" / "training.json").read_text(encoding="utf-8"))
    schema.validate(result)
    assert result == {name: 4.0 + place for place, name in enumerate(names)}, "the median of rounds 1, 4 and 7"


def test_a_missed_ratio_is_an_error_if_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training_bench, "nothing_left", contextlib.nullcontext)
    monkeypatch.setattr(training_bench, "measure", lambda kind: {"trainmover_ms": 200.0}.get(kind.name, 100.0))
    words = ["--quick", "--output", str(tmp_path / "training.json")]
    assert [main(words), main([*words, "--strict"])] == [0, 1]


def test_some_kinds_alone_write_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training_bench, "nothing_left", contextlib.nullcontext)
    monkeypatch.setattr(training_bench, "measure", lambda kind: 1.0)
    assert main(["--kinds", "gloo_ms", "--quick", "--output", str(tmp_path / "training.json")]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong",
    [
        {"gloo_ms": 280.5},
        {**RIGHT, "gloo_ms": 0},
        {**RIGHT, "compute_only_ms": "150"},
        {**RIGHT, "nccl_ms": 1.0},
        [RIGHT],
    ],
)
def test_the_schema_refuses_other_results(schema: jsonschema.Draft202012Validator, wrong: Any) -> None:
    schema.validate(RIGHT)
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(wrong)
