"""CPU time that resilience costs a job whose machines nobody replaces (`make bench`): on and off in turns, in one job.

The demo's job under agents and a controller; resilience takes part in every second iteration (resilience_idle_job.py).
Each rank's CPU time of an iteration, threads included, is compared with that of the one before it. Writes
build/bench/resilience_idle.json (docs/schemas/resilience_idle.json describes it).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import aims
from benchmarks.processes import nothing_left
from benchmarks.resilience_idle_job import FLAG, is_on
from benchmarks.training_bench import JOB, ROOT, write
from megatron.resilience.agent.driven_run import RunError, driven_run

RESULT = ROOT / "build" / "bench" / "resilience_idle.json"
MACHINES, RANKS = 4, 2
ITERATIONS, WARM_UP = 400, 10
LIMIT_S = 900.0
OVERHEAD_MAX = 0.01


def run(folder: Path, iterations: int) -> list[list[float]]:
    """CPU ms of each iteration, by global rank. Raises RunError."""
    flags = ["--machines", str(MACHINES), "--ranks-per-machine", str(RANKS), "--log-dir", str(folder / "logs")]
    flags += ["--resilience", "--elastic", "0"]
    script = [str(ROOT / "benchmarks" / "resilience_idle_job.py"), *JOB.split(), "--train-iters", str(iterations)]
    with driven_run(flags, [*script, FLAG, str(folder)], folder / "job.log") as job:
        job.wait(time.monotonic() + LIMIT_S)
    files = [folder / f"rank-{rank}.json" for rank in range(MACHINES * RANKS)]
    if missing := [file.name for file in files if not file.exists()]:
        raise RunError(f"found no {', '.join(missing)} after the run, expected the times of each rank")
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def compare(times_ms: Sequence[Sequence[float]]) -> dict[str, Any]:
    """As the schema says, of times by rank and iteration (from 1)."""
    job_ms = [sum(ranks) for ranks in zip(*times_ms, strict=True)]
    numbered = list(enumerate(job_ms, 1))[WARM_UP:]
    off = [value for iteration, value in numbered if not is_on(iteration)]
    # Each iteration with resilience against both of its neighbours without.
    costs_ms = [
        (ours - other) * (1 if is_on(iteration) else -1)
        for (_, other), (iteration, ours) in itertools.pairwise(numbered)
    ]
    cost_ms = statistics.median(costs_ms)
    off_ms = statistics.median(off)
    return {
        "iterations": len(job_ms),
        "off_cpu_ms": round(off_ms, 2),
        "on_cpu_ms": round(statistics.median(value for iteration, value in numbered if is_on(iteration)), 2),
        "overhead": round(cost_ms / off_ms, 5),
    }


def verdict(result: Mapping[str, Any]) -> str:
    """A line for the aim."""
    text = f"CPU time of an idle iteration: {result['overhead']:+.2%} (aim: at most {OVERHEAD_MAX:.0%})"
    return aims.line(result["overhead"] <= OVERHEAD_MAX, text)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--output", type=Path, default=RESULT)
    aims.add_strict(parser)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measures, writes and prints. 0: measured, and with --strict every aim met; 1: the run failed; 2: wrong flags."""
    flags = parse(words)
    try:
        with nothing_left() as folder:
            result = compare(run(folder, flags.iterations))
    except RunError as error:
        print(f"resilience_idle_bench: {error}", file=sys.stderr)
        return 1
    print(*(f"{name:12s} {value}" for name, value in result.items()), sep="\n")
    print(verdict(result))
    write(result, flags.output)
    print(f"written to {flags.output}")
    return aims.exit_code([verdict(result)], strict=flags.strict)


if __name__ == "__main__":
    sys.exit(main())
