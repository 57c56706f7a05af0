"""Checkpoint restart on a small job: saved by a signal, launched again, loaded; its cost is that of the gap.

The job is a script that keeps the trainer's promises (metrics, --save, --load, SIGTERM) and does nothing else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.resilience.agent.driven_run import RunError
from megatron.resilience.baselines.checkpoint_restart import CheckpointRestart
from megatron.resilience.baselines.interruption import JobSpec, Recovery

ITERATIONS, STEP_S = 30, 0.02
SCRIPT = f"""
import argparse, json, signal, sys, threading, time
from pathlib import Path
parser = argparse.ArgumentParser()
for flag in ("--save", "--load", "--metrics-file"):
    parser.add_argument(flag, type=Path)
parser.add_argument("--exit-signal-handler", action="store_true")
parser.add_argument("--forgets", type=int, default=0)
options = parser.parse_args()
done, asked = 0, threading.Event()
if options.load:
    done = int(options.load.read_text()) - options.forgets
    print(" loaded ", options.load, flush=True)
if options.exit_signal_handler:
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
with options.metrics_file.open("a") as metrics:
    while done < {ITERATIONS} and not asked.is_set():
        time.sleep({STEP_S})
        done += 1
        print(json.dumps({{"kind": "time", "iteration": done, "ended_s": time.time()}}), file=metrics, flush=True)
options.save.write_text(str(done))
"""


def job(folder: Path, *arguments: str) -> JobSpec:
    script = folder / "job.py"
    script.write_text(SCRIPT, encoding="utf-8")
    return JobSpec(
        script=str(script), arguments=arguments, machines=1, ranks_per_machine=1, folder=folder, limit_s=60.0
    )


def test_the_cost_is_the_gap_less_an_iteration_and_its_phases_add_up(tmp_path: Path) -> None:
    recovery: Recovery = CheckpointRestart()
    cost = recovery.interrupt(job(tmp_path), iteration=8)
    assert recovery.name == "checkpoint restart (exec)"
    assert cost.iterations_lost == 0
    assert STEP_S * 1e3 <= cost.median_iteration_ms < 20 * STEP_S * 1e3
    assert [name for name, _ in cost.phases] == ["save and stop", "launch, initialise and load", "first iteration"]
    assert min(duration_ms for _, duration_ms in cost.phases) > 0.0
    gap_ms = sum(duration_ms for _, duration_ms in cost.phases)
    assert cost.downtime_ms == pytest.approx(gap_ms - cost.median_iteration_ms)
    assert cost.downtime_ms > 100.0, "no launcher and no Python start that fast"
    assert int((tmp_path / "checkpoints").read_text(encoding="utf-8")) == ITERATIONS


def test_iterations_done_twice_are_lost(tmp_path: Path) -> None:
    assert CheckpointRestart().interrupt(job(tmp_path, "--forgets", "3"), iteration=8).iterations_lost == 3


def test_a_job_that_ends_before_it_could_be_interrupted_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"found the job's end before iteration {ITERATIONS + 1}"):
        CheckpointRestart().interrupt(job(tmp_path), iteration=ITERATIONS + 1)
