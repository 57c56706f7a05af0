"""Milliseconds of one iteration of the demo's job (`make bench`): over gloo, over our collectives, and computing alone.

"Computing alone" is our backend in isolated mode: each collective returns at once, so the losses mean nothing and the
time is the bound that no collectives can beat. The three kinds take turns in short runs, and each figure is the median
of its runs' medians, as the machine may be shared: compare only figures of one call. Writes build/bench/training.json
(docs/schemas/training.json describes it).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import aims
from benchmarks.processes import nothing_left

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "build" / "bench" / "training.json"
ITERATIONS, WARM_UP, ROUNDS = 25, 8, 3
RUN_S = 300
TO_COMPUTE_MAX, TO_GLOO_MAX = 1.25, 0.72
JOB = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--use-distributed-optimizer --micro-batch-size 2 --global-batch-size 16 --lr 3e-3 --mock-data --vocab-size 4095 "
    f"--eval-iters 0 --num-workers 0 --log-interval 1 --train-iters {ITERATIONS}"
)
LAUNCH = ("-m", "megatron.resilience.cli.main", "run", "--machines", "1", "--ranks-per-machine", "8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to run the job: its name in the result, flags of the trainer, and variables of the environment."""

    name: str
    flags: tuple[str, ...]
    variables: tuple[str, ...] = ()


KINDS = (
    Kind(name="gloo_ms", flags=("--distributed-backend", "gloo")),
    Kind(name="trainmover_ms", flags=("--distributed-backend", "trainmover")),
    Kind(
        name="compute_only_ms",
        flags=("--distributed-backend", "trainmover", "--no-check-for-nan-in-loss-and-grad"),
        variables=("TRAINMOVER_MODE=isolated",),
    ),
)


class RunError(RuntimeError):
    """A run of the trainer failed, or its log is not what was expected."""


def iteration_ms(log: str) -> list[float]:
    """Elapsed times of the trainer's log lines, in order, in milliseconds."""
    return [float(text) for text in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", log)]


def command(kind: Kind) -> list[str]:
    """What is run for `kind`."""
    return ["env", *kind.variables, sys.executable, *LAUNCH, "--", "pretrain_gpt.py", *JOB.split(), *kind.flags]


def measure(kind: Kind) -> float:
    """Median milliseconds of an iteration of one run, after the warm-up. Raises RunError."""
    try:
        done = subprocess.run(
            command(kind), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_S
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{kind.name}: not done after {RUN_S} s") from error
    times = iteration_ms(done.stdout)
    if done.returncode or len(times) != ITERATIONS:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise RunError(
            f"{kind.name}: exit code {done.returncode} and {len(times)} iterations, expected 0 and {ITERATIONS}; "
            f"the output ends:\n{tail}"
        )
    return statistics.median(times[WARM_UP:])


def ratios(result: Mapping[str, float]) -> list[str]:
    """A line for each aim, of the kinds that were run."""
    lines = []
    for other, aim in (("compute_only_ms", TO_COMPUTE_MAX), ("gloo_ms", TO_GLOO_MAX)):
        if "trainmover_ms" in result and other in result:
            ratio = result["trainmover_ms"] / result[other]
            lines.append(aims.line(ratio <= aim, f"trainmover_ms / {other} = {ratio:.2f} (aim: at most {aim})"))
    return lines


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [kind.name for kind in KINDS]
    parser.add_argument("--quick", action="store_true", help="one run of each kind")
    parser.add_argument("--kinds", nargs="+", choices=names, default=names, help="without all, nothing is written")
    parser.add_argument("--output", type=Path, default=RESULT)
    aims.add_strict(parser)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measures, writes and prints. 0: measured, and with --strict every aim met; 1: a run failed; 2: wrong flags."""
    flags = parse(words)
    taken: dict[str, list[float]] = {kind.name: [] for kind in KINDS if kind.name in flags.kinds}
    try:
        with nothing_left():
            for number in range(1 if flags.quick else ROUNDS):
                for kind in KINDS:
                    if kind.name in taken:
                        taken[kind.name].append(measure(kind))
                        print(f"round {number + 1}: {kind.name:16s} {taken[kind.name][-1]:8.1f}", flush=True)
    except RunError as error:
        print(f"training_bench: {error}", file=sys.stderr)
        return 1
    result = {name: round(statistics.median(times), 1) for name, times in taken.items()}
    for name, value in result.items():
        print(f"{name:16s} {value:8.1f}")
    lines = ratios(result)
    print(*lines, sep="\n")
    if len(result) == len(KINDS):
        write(result, flags.output)
        print(f"written to {flags.output}")
    return aims.exit_code(lines, strict=flags.strict)


def write(result: Mapping[str, Any], path: Path) -> None:
    """Writes `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(dict(result), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())
