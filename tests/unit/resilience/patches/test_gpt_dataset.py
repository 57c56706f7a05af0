"""A rank that is built alone makes missing indices of its data itself, and waits its turn; others are as before."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.resilience.patches import registry
from megatron.resilience.patches.gpt_dataset import as_first_rank, is_alone, turn_in
from megatron.training import preload  # noqa: F401  (device and patches first)
from megatron.training.environment import read_environment
from megatron.training.indexed_writer import IndexedWriter
from megatron.training.initialize import join_job, leave_job
from megatron.training.preflight import plan_run
from tests.unit.conftest import TINY

RANK = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "MASTER_PORT": "1"}


def write(prefix: Path) -> str:
    generator = np.random.default_rng(3)
    with IndexedWriter(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), "uint16") as writer:
        for _ in range(8):
            writer.add_document(generator.integers(0, 60, 100))
    return str(prefix)


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    return ["1", write(tmp_path / "one"), "2", write(tmp_path / "two")]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import trainmover_ext

    monkeypatch.setenv("TRAINMOVER_MODE", "isolated")
    yield
    leave_job()
    trainmover_ext.shutdown()


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    registry.revert_patches([name])
    try:
        yield
    finally:
        registry.apply_patches(on_cuda=False)


def build(data: list[str], cache: Path) -> Any:
    """The training set of rank 2 of 4, and its plan."""
    from megatron.training.data import build_gpt_datasets

    words = TINY.replace("--mock-data", "").replace("--global-batch-size 2", "--global-batch-size 4")
    argv = [*words.split(), "--data-path", *data, "--data-cache-path", str(cache), "--split", "100,0,0"]
    plan, _ = plan_run(argv, world_size=4, on_cuda=False)
    join_job(plan, read_environment(source=RANK))
    return build_gpt_datasets(plan, (16, 0, 0))[0]


def samples(dataset: Any) -> list[list[int]]:
    return [dataset[index]["tokens"].tolist() for index in range(len(dataset))]


@pytest.mark.usefixtures("alone")
def test_missing_indices_are_made_and_found_the_next_time(data: list[str], tmp_path: Path) -> None:
    made = build(data, tmp_path / "cache")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.npy")}
    first = samples(made)
    assert len(files) == 8
    leave_job()
    assert samples(build(data, tmp_path / "cache")) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.npy")} == files


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("missing", ["dataset-indices-alone", "blended-indices-alone"])
def test_without_the_patch_files_are_looked_for_that_nobody_wrote(
    data: list[str], tmp_path: Path, missing: str
) -> None:
    with without(missing), pytest.raises((FileNotFoundError, OSError), match=r"cache"):
        build(data, tmp_path / "cache")


def test_a_process_without_a_data_plane_is_not_alone() -> None:
    assert not is_alone()


@pytest.mark.usefixtures("alone")
def test_it_is_the_first_rank_only_to_who_asks_for_the_job(data: list[str], tmp_path: Path) -> None:
    build(data, tmp_path / "cache")
    assert is_alone()
    group = torch.distributed.new_group([1, 2, 3])
    with as_first_rank():
        assert (torch.distributed.get_rank(), torch.distributed.get_rank(group)) == (0, 1)
    assert torch.distributed.get_rank() == 2


@pytest.mark.usefixtures("alone")
def test_threads_that_overlap_leave_the_rank_as_it_was(data: list[str], tmp_path: Path) -> None:
    build(data, tmp_path / "cache")
    own = torch.distributed.get_rank
    both_in, first_out = threading.Barrier(2, timeout=30), threading.Event()

    def first() -> tuple[int, int]:
        with as_first_rank():
            both_in.wait()
            inside = torch.distributed.get_rank()
        rank = torch.distributed.get_rank()
        first_out.set()
        return inside, rank

    def last() -> tuple[int, int]:
        with as_first_rank():
            both_in.wait()
            assert first_out.wait(30)
            return torch.distributed.get_rank(), 2

    with ThreadPoolExecutor(2) as pool:
        seen = [future.result() for future in [pool.submit(first), pool.submit(last)]]
    assert seen == [(0, 2), (0, 2)]
    assert torch.distributed.get_rank is own


@pytest.mark.usefixtures("alone")
def test_a_thread_beside_keeps_its_rank(data: list[str], tmp_path: Path) -> None:
    build(data, tmp_path / "cache")
    with ThreadPoolExecutor(1) as pool, as_first_rank(), as_first_rank():
        assert (torch.distributed.get_rank(), pool.submit(torch.distributed.get_rank).result()) == (0, 2)


HOLD = """
import sys
from pathlib import Path
from megatron.resilience.patches.gpt_dataset import turn_in
with turn_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_processes_take_turns_and_a_wait_has_an_end(tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError, match="another process has held"), turn_in(tmp_path, limit_s=0.1):
        pass
    holder.communicate(timeout=30)
    with turn_in(tmp_path, limit_s=5.0):
        assert (tmp_path / "joining.lock").exists()
