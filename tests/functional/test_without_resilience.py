"""A job without `--resilience` has none of it: no module of it loaded, no thread started, no communicator opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.functional.launcher import Jobs, shape

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("telling_gpt.py")
SHORT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-3 --mock-data --num-workers 0 --eval-iters 0 "
    "--vocab-size 60 --tokenizer-type NullTokenizer"
)
PARTS = ("worker", "state", "protocol", "controller")


def told(jobs: Jobs, folder: Path, *flags: str) -> list[dict[str, Any]]:
    """By each of two ranks, at the end of a job with `flags`."""
    folder.mkdir()
    words = (*SHORT.split(), "--tell", str(folder))
    job = jobs.start(SCRIPT, *shape(1, 2), *flags, arguments=words)
    assert job.finish() == 0, "\n".join(job.lines)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def of_resilience(facts: dict[str, Any]) -> set[str]:
    """Parts of it that are loaded."""
    return {name.split(".")[2] for name in facts["modules"]} & set(PARTS)


def test_a_job_without_resilience_has_none_of_it(jobs: Jobs, tmp_path: Path) -> None:
    without = told(jobs, tmp_path / "without")
    with_it = told(jobs, tmp_path / "with", "--resilience", "--elastic", "0")
    for rank in range(2):
        assert of_resilience(with_it[rank]) >= {"worker", "state", "protocol"}, "else this test sees nothing"
        assert of_resilience(without[rank]) == set()
        assert set(with_it[rank]["threads"]) - set(without[rank]["threads"]) == {"agent-link"}
        assert set(without[rank]["threads"]) <= set(with_it[rank]["threads"])
        more = set(with_it[rank]["communicators"]) - set(without[rank]["communicators"])
        assert len(more) == 1
        assert "vote" in more.pop()
        assert set(without[rank]["communicators"]) <= set(with_it[rank]["communicators"])
