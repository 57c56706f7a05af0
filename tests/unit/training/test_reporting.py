"""Megatron-LM's log line, and metrics that read back exactly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.training.arguments import parse_settings
from megatron.training.layout import Plan, resolve
from megatron.training.reporting import Reporter
from megatron.training.step import StepResult

BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --max-position-embeddings 8 --seq-length 8 "
    "--micro-batch-size 1 --train-iters 100 --lr 1e-3 --mock-data --log-interval 2"
)


def plan(flags: str = "") -> Plan:
    return resolve(parse_settings(f"{BASE} {flags}".split()), world_size=1, on_cuda=False)


def step(loss: float, **changes: Any) -> StepResult:
    values: dict[str, Any] = {
        "losses": {"lm loss": loss},
        "grad_norm": 1.25,
        "zeros_in_grad": None,
        "learning_rate": 1e-4,
        "loss_scale": 1.0,
        "samples": 16,
        "skipped": False,
    }
    return StepResult(**{**values, **changes})


def report(reporter: Reporter, *steps: StepResult) -> None:
    reporter.start()
    for iteration, result in enumerate(steps, start=1):
        reporter.step(iteration, 16 * iteration, result, None)
    reporter.stop()


def test_the_line_is_megatrons_and_averages_over_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    report(Reporter(plan(), speaks=True), step(4.0), step(2.0))
    (line,) = capsys.readouterr().out.splitlines()
    parts = [part.strip() for part in line.strip(" |").split("|")]
    assert parts[0].endswith("iteration        2/     100")
    assert parts[0].startswith("[20")
    assert parts[1] == "consumed samples:           32"
    assert parts[2].startswith("elapsed time per iteration (ms): ")
    assert parts[3:] == [
        "learning rate: 1.000000E-04",
        "global batch size:    16",
        "lm loss: 3.000000E+00",
        "loss scale: 1.0",
        "grad norm: 1.250",
        "number of skipped iterations:   0",
        "number of nan iterations:   0",
    ]


def test_skipped_and_infinite_iterations_are_counted_and_kept_out_of_the_mean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = plan("--log-interval 3")
    report(Reporter(settings, speaks=True), step(9.0, skipped=True), step(math.inf), step(2.0))
    line = capsys.readouterr().out
    assert "lm loss: 2.000000E+00" in line
    assert "skipped iterations:   1" in line
    assert "nan iterations:   1" in line


def test_a_rank_that_does_not_speak_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(Reporter(plan(f"--metrics-file {tmp_path / 'm'}"), speaks=False), step(4.0), step(2.0))
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "m").exists()


def test_metrics_read_back_exactly_and_are_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "metrics.jsonl"
    settings = plan(f"--metrics-file {path}")
    loss = 0.1 + 0.2
    for _ in range(2):
        report(Reporter(settings, speaks=True), step(loss, grad_norm=1 / 3))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["kind"] for record in records] == ["step", "time"] * 2
    assert [record["losses"]["lm loss"] for record in records[::2]] == [loss, loss]
    assert records[0]["grad_norm"] == 1 / 3
    assert records[1]["ended_s"] <= records[3]["ended_s"]


def test_evaluations_and_digests_are_recorded(tmp_path: Path) -> None:
    reporter = Reporter(plan(f"--metrics-file {tmp_path / 'm'}"), speaks=True)
    reporter.start()
    reporter.evaluation(7, "validation", {"lm loss": 1.5})
    reporter.digests(7, ["ab", "cd"], ["ef", "01"])
    reporter.stop()
    evaluation, state = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert evaluation == {"kind": "evaluation", "iteration": 7, "split": "validation", "losses": {"lm loss": 1.5}}
    assert (state["sha256"], state["small_sha256"]) == (["ab", "cd"], ["ef", "01"])


def test_evaluating_and_saving_do_not_count_as_time_of_iterations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("megatron.training.reporting.time.perf_counter", lambda: now_s[0])
    reporter = Reporter(plan("--log-throughput"), speaks=True)
    reporter.start()
    for iteration, samples in ((1, 16), (2, 32)):
        now_s[0] += 1.0
        reporter.step(iteration, 16, step(1.0, samples=samples), None)
        with reporter.paused():
            now_s[0] += 100.0
    line = capsys.readouterr().out
    assert "elapsed time per iteration (ms): 1000.0" in line
    assert "throughput (tokens/s): 192.0" in line  # (16 + 32) / 2 samples of 8 tokens in one second
