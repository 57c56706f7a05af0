"""The real trainer: a machine that would train other bits is refused by name of what differs, and training goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.training.indexed_writer import IndexedWriter
from tests.functional.launcher import LIMIT_S, Jobs, RunningJob, shape

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
TRAINING = (
    "--hidden-size 64 --num-attention-heads 2 --max-position-embeddings 32 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 2 --train-iters 100000 --lr 1e-3 --lr-decay-iters 1000 --log-interval 10 --num-workers 0 "
    "--eval-iters 0 --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 100"
)


def write_data(folder: Path) -> None:
    with IndexedWriter(folder / "text.bin", folder / "text.idx", "uint16") as writer:
        for start in range(20):
            writer.add_document([(start + token) % 100 for token in range(80)])


def flip_last_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def replace(path: Path, content: bytes) -> None:
    """As editors and copies do: whoever has opened the file, such as the running ranks, keeps what was there."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(content)
    fresh.replace(path)


EDITS: tuple[tuple[str, Callable[[bytes], bytes], str], ...] = (
    (
        "settings.yaml",
        lambda text: text.replace(b"2", b"3"),
        "model configuration: found --num-layers=3, the job runs ",
    ),
    ("text.bin", flip_last_bit, "data: found --data-path 0 text.bin="),
    ("train.py", lambda text: text + b"\n# another\n", "script: found train.py="),
)


def command(job: RunningJob, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    directory = str(job.log_dir / "resilience")
    return subprocess.run(
        [sys.executable, "-m", "megatron.resilience.cli.main", name, "--resilience-dir", directory, *flags],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def wait_until_it_has_trained_on(job: RunningJob) -> None:
    """From where it was seen last, which is a second ago at most."""
    seen = json.loads(command(job, "status", "--json").stdout)["iteration"]
    job.wait_for_lines(rf" iteration +{(seen // 10 + 5) * 10}/", 1)


def test_files_that_were_edited_since_the_job_began_are_found(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("num_layers: 2\n")
    (tmp_path / "train.py").write_bytes((ROOT / "pretrain_gpt.py").read_bytes())
    write_data(tmp_path)
    flags = [*TRAINING.split(), "--yaml-cfg", str(tmp_path / "settings.yaml"), "--data-path", str(tmp_path / "text")]
    cache = ["--data-cache-path", str(tmp_path / "cache")]
    job = jobs.start(
        tmp_path / "train.py",
        *(*shape(2, 1), "--resilience", "--elastic", "1"),
        arguments=(*flags, *cache),
        PYTHONPATH=str(ROOT),
    )
    job.wait_for_lines(r" iteration +\d+/", 1)
    for name, edit, said in EDITS:
        path = tmp_path / name
        before = path.read_bytes()
        replace(path, edit(before))
        refused = command(job, "migrate", "--from", "machine-1")
        replace(path, before)
        assert refused.returncode == 1, refused.stdout
        assert said in refused.stdout + refused.stderr, refused.stdout + refused.stderr
        wait_until_it_has_trained_on(job)
    moved = command(job, "migrate", "--from", "machine-1")
    assert moved.returncode == 0, moved.stdout + moved.stderr
    wait_until_it_has_trained_on(job)
    job.process.terminate()
    job.finish()
    job.wait_until_nothing_lives()
