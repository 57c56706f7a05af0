"""One job, carried by different means: equal losses wherever its ranks run, and close to those of gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--use-distributed-optimizer --micro-batch-size 2 --global-batch-size 16 --lr 3e-3 --mock-data --vocab-size 4095 "
    "--eval-iters 0 --num-workers 0 --log-interval 10 --log-state-digest"
)


def run(folder: Path, machines: int, flags: str = "", *, iterations: int = 50) -> tuple[list[float], list[str]]:
    """Losses of the demo's job of eight ranks on so many machines, and the digest of each rank's final state."""
    metrics = folder / f"{machines}{flags.replace(' ', '')}.jsonl"
    launch = f"-m megatron.resilience.cli.main run --machines {machines} --ranks-per-machine {8 // machines}"
    done = subprocess.run(
        [
            sys.executable,
            *f"{launch} -- pretrain_gpt.py {DEMO} {flags} --train-iters {iterations} --metrics-file {metrics}".split(),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    (state,) = [record["sha256"] for record in records if record["kind"] == "state"]
    return [record["losses"]["lm loss"] for record in records if record["kind"] == "step"], list(state)


@pytest.mark.distributed
@pytest.mark.parametrize("iterations", [20, pytest.param(50, marks=pytest.mark.nightly)])
def test_losses_have_equal_bits_for_any_number_of_ranks_a_machine_and_are_close_to_gloos(
    tmp_path: Path, iterations: int
) -> None:
    one_machine = run(tmp_path, 1, iterations=iterations)
    assert len(one_machine[0]) == iterations
    assert run(tmp_path, 4, iterations=iterations) == one_machine  # memory within a machine, sockets between
    over_gloo = run(tmp_path, 1, "--distributed-backend gloo", iterations=iterations)
    assert one_machine[0] == pytest.approx(over_gloo[0], rel=1e-4)


@pytest.mark.nightly
@pytest.mark.distributed
def test_losses_have_equal_bits_on_two_machines_on_eight_and_again_on_one(tmp_path: Path) -> None:
    one_machine = run(tmp_path, 1)
    assert run(tmp_path, 2) == one_machine
    assert run(tmp_path, 8) == one_machine  # sockets only
