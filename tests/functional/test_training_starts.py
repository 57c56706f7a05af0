"""The real trainer under each launcher, with a typical Megatron-LM command, and refused before any rank starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.indexed_writer import IndexedWriter
from tests.functional.launcher import START_MODES, Jobs, shape

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "pretrain_gpt.py"
LAUNCH = (sys.executable, "-m", "megatron.resilience.cli.main", "run")
SHORT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 --mock-data --num-workers 0 --eval-iters 0 "
    "--log-interval 1 --pipeline-model-parallel-size 2"
)


def losses(metrics: Path) -> list[float]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["losses"]["lm loss"] for record in records if record["kind"] == "step"]


def test_fork_exec_and_torchrun_start_the_same_run(jobs: Jobs, tmp_path: Path) -> None:
    for mode in START_MODES:
        words = (*SHORT.split(), "--metrics-file", str(tmp_path / mode))
        job = jobs.start(SCRIPT, *shape(1, 2), "--start", mode, arguments=words)
        assert job.finish() == 0, "\n".join(job.lines)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--log-dir", str(tmp_path / "torchrun-logs")]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), *SHORT.split(), "--metrics-file", str(tmp_path / "torchrun")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "fork")) == 4
    assert losses(tmp_path / "fork") == losses(tmp_path / "exec") == losses(tmp_path / "torchrun")


# A GPT launch as Megatron-LM's examples have it, in their order and with their spelling; only the sizes are small.
TYPICAL = """
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --attention-backend auto --micro-batch-size 1 --global-batch-size 4 --train-iters 6
--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --bf16 --lr 6.0e-4
--lr-decay-style cosine --min-lr 6.0e-5 --lr-warmup-fraction .1 --lr-decay-iters 5 --data-path {data}
--vocab-file {vocab} --merge-file {merges} --split 900,50,50 --log-interval 1 --save-interval 4 --eval-interval 3
--save {save} --load {save} --eval-iters 1 --tensorboard-dir {board} --distributed-backend nccl --use-mcore-models
--use-flash-attn --recompute-activations --no-masked-softmax-fusion --transformer-impl transformer_engine
--log-timers-to-tensorboard --timing-log-level 1 --wandb-project gpt --tp-comm-overlap --distributed-timeout-minutes 60
"""


def test_a_typical_megatron_command_runs_after_changing_only_paths(jobs: Jobs, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"text number {number}: " + "the quick brown fox jumps. " * 40)
    prepare = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "--input", str(text), "--vocab-size", "300"]
    subprocess.run([*prepare, "--output-prefix", str(tmp_path / "data")], check=True, capture_output=True, timeout=120)
    paths = {
        "data": tmp_path / "data_text_document",
        "vocab": tmp_path / "data-vocab.json",
        "merges": tmp_path / "data-merges.txt",
        "save": tmp_path / "checkpoints",
        "board": tmp_path / "board",
    }
    job = jobs.start(SCRIPT, *shape(2, 2), arguments=tuple(TYPICAL.format(**paths).split()))
    assert job.finish() == 0, "\n".join(job.lines)
    output = "\n".join(job.lines)
    for words in ("trainmover is used", "--wandb-project is ignored", "validation loss at iteration 6", "test loss"):
        assert words in output, words
    assert (paths["save"] / "iter_0000006").is_dir()
    assert list(paths["board"].iterdir())


def refused(arguments: str, folder: Path, *flags: str) -> str:
    """The one line on stderr of `trainmover run` that starts no rank."""
    logs = folder / "logs"
    done = subprocess.run(
        [*LAUNCH, *shape(2, 2), "--log-dir", str(logs), *flags, "--", str(SCRIPT), *arguments.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert not list(logs.glob("rank-*")), "a rank was started"
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("--tensor-model-parallel-size 3", "found 4 ranks, expected a multiple of 6"),
        ("--num-layers 3", "--num-layers 3 does not divide into 2 stages"),
        ("--hiden-dropout 0", "unknown flag --hiden-dropout; did you mean --hidden-dropout?"),
        ("--save file/below", "is not a folder"),
        ("--load other", "is of another model"),
        ("--data-path {absent}", "absent"),
        ("--data-path {truncated}", "truncated"),
    ],
)
def test_wrong_input_is_refused_before_any_rank_starts(tmp_path: Path, change: str, complaint: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with IndexedWriter(tmp_path / "truncated.bin", tmp_path / "truncated.idx", "uint16") as writer:
        writer.add_document(list(range(100)))
    os.truncate(tmp_path / "truncated.bin", 100)
    if change == "--load other":
        other = f"{SHORT} --hidden-size 64 --train-iters 1 --save other"
        save_a_checkpoint(other, tmp_path)
    change = change.format(absent=tmp_path / "absent", truncated=tmp_path / "truncated")
    base = SHORT.replace("--mock-data", "--tokenizer-type NullTokenizer --vocab-size 100")
    words = f"{base if 'data-path' in change else SHORT} {change}"
    before = sorted(tmp_path.rglob("*"))
    assert complaint in refused(words, tmp_path)
    after = [path for path in sorted(tmp_path.rglob("*")) if "logs" not in path.parts]
    assert after == before, "something was written"


def save_a_checkpoint(arguments: str, folder: Path) -> None:
    words = [*LAUNCH, *shape(1, 2), "--log-dir", str(folder / "logs-of-other"), "--", str(SCRIPT), *arguments.split()]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=120)


def test_a_busy_port_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert str(port) in refused(SHORT, tmp_path, "--port", str(port))
