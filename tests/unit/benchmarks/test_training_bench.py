"""The benchmark reads what the trainer writes."""

from __future__ import annotations

import json

from benchmarks.training_bench import ROOT, iteration_ms


def test_elapsed_times_are_found_in_the_log() -> None:
    line = "[rank 7]  [2026-01-01 00:00:00.0] iteration        1/     2 | elapsed time per iteration (ms): 312.4 | lm"
    assert iteration_ms(f"{line}\nprogress: 1/2 iterations\n{line.replace('312.4', '99.0')}") == [312.4, 99.0]


def test_the_schema_describes_the_result() -> None:
    schema = json.loads((ROOT / "docs" / "schemas" / "training.json").read_text(encoding="utf-8"))
    assert schema["required"] == ["gloo_ms"]
