"""What resilience costs a job whose machines nobody replaces (`make bench`): on and off in turns, in one job.

The demo's job under agents and a controller; resilience takes part in every second iteration (resilience_idle_job.py).
The ranks' CPU time of an iteration, threads included, is compared with that of the one before it, and so is its time on
the wall. What launcher, controller, agents and spawners take is told by itself, and added as if a job without
resilience had none of them. What is there in every iteration, such as a thread that sleeps on the line to the agent,
is not seen by this; tests/functional/test_without_resilience.py shows that a job without resilience has none of it.
Intervals are of 95 %, from blocks of neighbouring iterations drawn again. Writes build/bench/resilience_idle.json
(docs/schemas/resilience_idle.json describes it).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import aims
from benchmarks.processes import nothing_left
from benchmarks.resilience_idle_job import FLAG, WARM_UP, is_on
from benchmarks.training_bench import JOB, ROOT, write
from megatron.resilience.agent.driven_run import RunError, driven_run

RESULT = ROOT / "build" / "bench" / "resilience_idle.json"
MACHINES, RANKS = 4, 2
ITERATIONS = 400
LIMIT_S = 900.0
OVERHEAD_MAX = 0.01
BLOCK, DRAWS = 10, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """By global rank and iteration (from 1), in ms; `others_cpu_ms`: of all other processes, since the warm-up."""

    cpu_ms: list[list[float]]
    wall_ms: list[list[float]]
    others_cpu_ms: float


def run(folder: Path, iterations: int) -> Times:
    """One job. Raises RunError."""
    (folder / "driver.pid").write_text(str(os.getpid()), encoding="utf-8")
    flags = ["--machines", str(MACHINES), "--ranks-per-machine", str(RANKS), "--log-dir", str(folder / "logs")]
    flags += ["--resilience", "--elastic", "0"]
    script = [str(ROOT / "benchmarks" / "resilience_idle_job.py"), *JOB.split(), "--train-iters", str(iterations)]
    with driven_run(flags, [*script, FLAG, str(folder)], folder / "job.log") as job:
        job.wait(time.monotonic() + LIMIT_S)
    files = [folder / f"rank-{rank}.json" for rank in range(MACHINES * RANKS)]
    if missing := [file.name for file in files if not file.exists()]:
        raise RunError(f"found no {', '.join(missing)} after the run, expected the times of each rank")
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return Times(
        cpu_ms=[rank["cpu_ms"] for rank in found],
        wall_ms=[rank["wall_ms"] for rank in found],
        others_cpu_ms=sum(rank["others_cpu_ms"] for rank in found),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of iterations with resilience and without, in ms; `cost` of one iteration, `low` to `high` its interval."""

    off: float
    on: float
    cost: float
    low: float
    high: float


def compare(job_ms: Sequence[float]) -> Comparison:
    """Of a job's iterations from the first one on; medians. Each is set against both of its neighbours."""
    numbered = list(enumerate(job_ms, 1))[WARM_UP:]
    costs = [
        (ours - other) * (1 if is_on(iteration) else -1)
        for (_, other), (iteration, ours) in itertools.pairwise(numbered)
    ]
    low, high = interval(costs)
    return Comparison(
        off=statistics.median(value for iteration, value in numbered if not is_on(iteration)),
        on=statistics.median(value for iteration, value in numbered if is_on(iteration)),
        cost=statistics.median(costs),
        low=low,
        high=high,
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians that as many values have, drawn again in blocks: neighbours have an iteration in common."""
    chance = random.Random(0)
    size = min(BLOCK, len(values))
    starts = range(len(values) - size + 1)
    medians = sorted(
        statistics.median(itertools.chain(*(values[at : at + size] for at in chance.choices(starts, k=count))))
        for count in [-(-len(values) // size)] * DRAWS
    )
    return medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS) - 1]


def result_of(times: Times) -> dict[str, Any]:
    """As the schema says."""
    cpu = compare([sum(ranks) for ranks in zip(*times.cpu_ms, strict=True)])
    wall = compare([max(ranks) for ranks in zip(*times.wall_ms, strict=True)])
    iterations = len(times.cpu_ms[0])
    control_ms = times.others_cpu_ms / (iterations - WARM_UP)
    return {
        "iterations": iterations,
        "off_cpu_ms": round(cpu.off, 2),
        "on_cpu_ms": round(cpu.on, 2),
        "overhead": round(cpu.cost / cpu.off, 5),
        "overhead_interval": [round(cpu.low / cpu.off, 5), round(cpu.high / cpu.off, 5)],
        "control_cpu_ms": round(control_ms, 2),
        "overhead_with_control": round((cpu.cost + control_ms) / cpu.off, 5),
        "off_wall_ms": round(wall.off, 2),
        "on_wall_ms": round(wall.on, 2),
        "wall_overhead": round(wall.cost / wall.off, 5),
        "wall_overhead_interval": [round(wall.low / wall.off, 5), round(wall.high / wall.off, 5)],
    }


def judge(result: Mapping[str, Any]) -> list[str]:
    """A line for each aim."""
    kinds = {
        "CPU time of an idle iteration on all ranks": ("overhead", result["overhead_interval"]),
        "the same with controller, agents, spawners and launcher": ("overhead_with_control", None),
        "time of an idle iteration on the wall": ("wall_overhead", result["wall_overhead_interval"]),
    }
    return [
        aims.line(
            result[name] <= OVERHEAD_MAX,
            f"{words}: {result[name]:+.2%}"
            + (f", between {between[0]:+.2%} and {between[1]:+.2%}" if between else "")
            + f" (aim: at most {OVERHEAD_MAX:.0%})",
        )
        for words, (name, between) in kinds.items()
    ]


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
            result = result_of(run(folder, flags.iterations))
    except RunError as error:
        print(f"resilience_idle_bench: {error}", file=sys.stderr)
        return 1
    lines = judge(result)
    print(*(f"{name:22s} {value}" for name, value in result.items()), sep="\n")
    print(*lines, sep="\n")
    write(result, flags.output)
    print(f"written to {flags.output}")
    return aims.exit_code(lines, strict=flags.strict)


if __name__ == "__main__":
    sys.exit(main())
