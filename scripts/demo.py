"""The first thing a newcomer runs (`make demo`): trains a small GPT on Python's own sources in 8 processes.

Prepares the data once, trains with tensor 2 x pipeline 2 x data 2 as four "machines" of two ranks, starts again
from the checkpoint in the middle, then trains once more while one machine is replaced by another, and compares all
three runs bit for bit. All of it lies under build/demo/.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.resilience.agent.driven_run import RunError
from megatron.resilience.proof.compare import Difference, first_difference, read_records
from megatron.resilience.proof.planned import ProofSpec, migrated
from megatron.resilience.proof.schedule import Move

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "demo"
PREFIX = FOLDER / "data" / "stdlib"
MIGRATED = FOLDER / "migrated"
ITERATIONS, MIDDLE = 50, 40
LIMIT_S = 600.0
LAUNCH = ["-m", "megatron.resilience.cli.main", "run", "--machines", "4", "--ranks-per-machine", "2"]
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0.0 --hidden-dropout 0.0"
)
TRAINING = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer "
    f"--micro-batch-size 4 --global-batch-size 16 --train-iters {ITERATIONS} --lr 6e-3 --min-lr 6e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 5 --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95 "
    "--eval-iters 2 --log-interval 5 --num-workers 0"
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run left in its metrics file."""

    steps: list[dict[str, Any]]
    state: list[str]
    validation_loss: float
    seconds: float


def main() -> int:
    """0 when the run went well and the loss fell; 1 otherwise."""
    say("1. Text: Python's standard library, as tokens")
    code = python(
        "scripts/prepare_data.py", "--input", "stdlib", "--output-prefix", str(PREFIX), "--vocab-size", "4096"
    )
    if code:
        return code
    for name in ("straight", "resumed", "checkpoints", "migrated"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    say(f"2. Training: {ITERATIONS} iterations on 4 machines of 2 processes (tensor 2 x pipeline 2 x data 2)")
    checkpoints = FOLDER / "checkpoints"
    straight = train("straight", "--save", str(checkpoints), "--save-interval", str(MIDDLE))
    if straight is None:
        return 1
    say(f"3. The same again from the checkpoint of iteration {MIDDLE}: is it the same run, bit for bit?")
    resumed = train("resumed", "--load", str(checkpoints), "--ckpt-step", str(MIDDLE))
    if resumed is None:
        return 1
    say("4. The same once more, and machine 1 is replaced by a fresh one while the others train on")
    try:
        difference, incident = replace_a_machine()
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    return summary(straight, resumed, difference, incident)


def words_of_training() -> list[str]:
    """The arguments that all runs share."""
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer"]
    tokenizer += ["--vocab-file", f"{PREFIX}-vocab.json", "--merge-file", f"{PREFIX}-merges.txt"]
    return [*MODEL.split(), *TRAINING.split(), "--data-path", f"{PREFIX}_text_document", *tokenizer]


def replace_a_machine() -> tuple[Difference | None, dict[str, Any]]:
    """Where the run with another machine differs from the straight one, and what `trainmover incidents` tells of it."""
    MIGRATED.mkdir(parents=True)
    spec = ProofSpec(
        script=("pretrain_gpt.py", *words_of_training()),
        machines=4,
        ranks_per_machine=2,
        moves=(Move(iteration=1, slots=(1,)),),
        folder=MIGRATED,
        limit_s=LIMIT_S,
    )
    records, incidents = migrated(spec, lambda line: print(f"trainmover: {line}", flush=True))
    straight = (FOLDER / "straight" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return first_difference(read_records(straight), records), done_one(incidents)


def done_one(incidents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The migration that was done; tries before it may have come to nothing. Raises RunError without one."""
    for incident in incidents:
        if incident["outcome"] == "done":
            return incident
    told = [f"{incident['outcome']}: {incident['why']}" for incident in incidents]
    raise RunError(f"found incidents {told}, expected one that is done; look at {relative(MIGRATED / 'migrated.log')}")


def train(name: str, *flags: str) -> Run | None:
    """Trains into build/demo/`name`; None when the job failed (it has said why)."""
    folder = FOLDER / name
    metrics = folder / "metrics.jsonl"
    started_s = time.monotonic()
    words = [*words_of_training(), *flags, "--metrics-file", str(metrics), "--log-state-digest"]
    code = python(*LAUNCH, "--log-dir", str(folder / "logs"), "--", "pretrain_gpt.py", *words)
    if code:
        return None
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return Run(
        steps=[record for record in records if record["kind"] == "step"],
        state=next(record["sha256"] for record in records if record["kind"] == "state"),
        validation_loss=next(r["losses"]["lm loss"] for r in records if r.get("split") == "validation"),
        seconds=time.monotonic() - started_s,
    )


def summary(straight: Run, resumed: Run, difference: Difference | None, incident: dict[str, Any]) -> int:
    """Tells a newcomer what was seen; 1 when the loss did not fall or any bit differs."""
    first, last = straight.steps[0]["losses"]["lm loss"], straight.steps[-1]["losses"]["lm loss"]
    learned = last < 0.85 * first
    equal = straight.steps[MIDDLE:] == resumed.steps and straight.state == resumed.state
    tokens = len(straight.steps) * 16 * 64
    say("Summary")
    print(f"  The model read {tokens:,} tokens of Python in {straight.seconds:.0f} s, start-up included.")
    print(f"  Loss {first:.2f} -> {last:.2f} (on text it never saw: {straight.validation_loss:.2f}).")
    print(f"  In words: from a guess among {math.exp(first):,.0f} equally likely tokens to {math.exp(last):,.0f}.")
    print(f"  {'It learned.' if learned else 'IT DID NOT LEARN: something is wrong.'}")
    verdict = "equal in every bit" if equal else "NOT EQUAL: something is wrong"
    print(f"  Stopped and resumed at iteration {MIDDLE}: losses, gradient norms and final state {verdict}.")
    print(
        f"  Machine {incident['leavers'][0]} was replaced by {incident['joiners'][0]} at iteration "
        f"{incident['boundary']}: downtime {downtime_words(incident['downtime_ms'])}, "
        f"{incident['links_replaced']} links replaced and {incident['links_kept']} kept;"
    )
    changed = "no bit of it changed" if difference is None else f"IT CHANGED THE RUN: {difference}"
    print(f"  losses, gradient norms and final state against the straight run: {changed}.")
    print("  (Downtime: by how much that iteration was longer than the median before it; below 0 if it was quicker.)")
    print(f"  Logs, one a rank: {relative(FOLDER / 'straight' / 'logs')}")
    print(f"  Exact numbers:    {relative(FOLDER / 'straight' / 'metrics.jsonl')}")
    print(f"  Checkpoints:      {relative(FOLDER / 'checkpoints')}")
    print(f"  What it cost:     .venv/bin/trainmover incidents --resilience-dir {relative(MIGRATED / 'resilience')}")
    print("  Next: docs/tour.md explains what ran; try `.venv/bin/trainmover run --help`.")
    return 0 if learned and equal and difference is None else 1


def downtime_words(downtime_ms: float | None) -> str:
    """A downtime for people."""
    return "not measured" if downtime_ms is None else f"{downtime_ms:.0f} ms"


def relative(path: Path) -> Path:
    """`path` as seen from the project's folder."""
    return path.relative_to(ROOT)


def say(text: str) -> None:
    """A heading."""
    print(f"\n== {text}", flush=True)


def python(*words: str) -> int:
    """Runs this Python with `words` in the project's folder, and gives its exit code."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
