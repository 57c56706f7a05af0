"""Milliseconds of one iteration of the demo's job (`make bench`): median over the iterations of one run.

Writes build/bench/training.json (docs/schemas/training.json describes it) and prints it as a table. The machine may be
shared: compare only figures of one run.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "build" / "bench" / "training.json"
ITERATIONS, WARM_UP = 40, 10
JOB = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--use-distributed-optimizer --micro-batch-size 2 --global-batch-size 16 --lr 3e-3 --mock-data --vocab-size 4095 "
    f"--eval-iters 0 --num-workers 0 --log-interval 1 --train-iters {ITERATIONS}"
)


def iteration_ms(log: str) -> list[float]:
    """Elapsed times of the trainer's log lines, in order, in milliseconds."""
    return [float(text) for text in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", log)]


def measure() -> float:
    """Median milliseconds of an iteration over gloo, after the warm-up. Raises CalledProcessError."""
    launch = [
        sys.executable,
        "-m",
        "megatron.resilience.cli.main",
        "run",
        "--machines",
        "1",
        "--ranks-per-machine",
        "8",
    ]
    done = subprocess.run(
        [*launch, "--", "pretrain_gpt.py", *JOB.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    return statistics.median(iteration_ms(done.stdout)[WARM_UP:])


def main() -> int:
    """Measures, writes and prints."""
    result = {"gloo_ms": round(measure(), 1)}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, value in result.items():
        print(f"{name:12s} {value:8.1f}")
    print(f"written to {RESULT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
