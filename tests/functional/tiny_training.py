"""A tiny GPT on two machines: started, and what it recorded. For tests of what must not change a bit of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.resilience.proof.compare import Record, first_difference, read_records
from tests.functional.control_job import ROOT
from tests.functional.launcher import Jobs, RunningJob, shape

SCRIPT = Path(__file__).with_name("dying_gpt.py")
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 3e-3 --mock-data --vocab-size 60 --tokenizer-type NullTokenizer "
    "--log-interval 1 --num-workers 0 --eval-iters 0 --train-iters 60 --log-state-digest "
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer"
)

Untouched = Callable[[int], list[Record]]
"""Ranks a machine -> what a run that nobody touched records."""


def metrics_in(folder: Path) -> Path:
    """Where a run in `folder` records."""
    return folder / "metrics.jsonl"


def arguments(folder: Path) -> tuple[str, ...]:
    """Of the script."""
    return (*FLAGS.split(), "--metrics-file", str(metrics_in(folder)))


def records_in(folder: Path) -> list[Record]:
    """What was recorded so far. The last line may be half written."""
    path = metrics_in(folder)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return read_records(text[: text.rfind("\n") + 1].splitlines())


def start(jobs: Jobs, ranks: int, *flags: str, more: tuple[str, ...] = ()) -> RunningJob:
    """Two machines of `ranks` ranks, which have begun to train; what they leave in a temporary folder can be seen."""
    temporary = jobs.directory / "temporary"
    temporary.mkdir(exist_ok=True)
    job = jobs.start(
        SCRIPT,
        *(*shape(2, ranks), *flags),
        arguments=(*arguments(jobs.directory), *more),
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
        TMPDIR=str(temporary),
    )
    job.wait_for_lines(r" iteration +2/", 1)
    return job


def check_equal(folder: Path, expected: list[Record]) -> None:
    """Every loss, norm and digest of the run in `folder`."""
    difference = first_difference(expected, records_in(folder))
    assert difference is None, str(difference)
