"""Checkpoint files are written by the rank itself; results pass through memory, without a helper process."""

from __future__ import annotations

import multiprocessing
import os
import queue
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron.resilience.patches import registry
from megatron.resilience.patches.filesystem_async import MemoryFileQueue
from megatron.training import preload  # noqa: F401  (device and patches first)

MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def children() -> set[psutil.Process]:
    """The test process's own; other tests of the session may have some too."""
    return set(psutil.Process().children())


def test_items_come_out_in_order() -> None:
    box = MemoryFileQueue()
    for item in ({1: "a"}, [2], "three"):
        box.put(item)
    assert [box.get_nowait() for _ in range(3)] == [{1: "a"}, [2], "three"]
    with pytest.raises(queue.Empty):
        box.get_nowait()


def test_a_forked_child_can_put_more_than_a_pipe_holds_before_anyone_reads() -> None:
    box = MemoryFileQueue()
    child = multiprocessing.get_context("fork").Process(target=box.put, args=(b"x" * 5_000_000,))
    child.start()
    child.join(timeout=30)
    assert child.exitcode == 0
    assert len(box.get_nowait()) == 5_000_000


def test_an_item_that_is_not_whole_is_not_given() -> None:
    box = MemoryFileQueue()
    os.pwrite(box._descriptor, (100).to_bytes(8, "little") + b"short", 0)
    with pytest.raises(queue.Empty):
        box.get_nowait()


def test_the_descriptor_is_closed_with_the_queue() -> None:
    box = MemoryFileQueue()
    descriptor = box._descriptor
    del box
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_save_starts_no_process() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    before = children()
    filesystem_async._get_write_results_queue()
    assert children() == before


def test_without_the_patch_each_rank_starts_a_manager_process() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    before = children()
    registry.revert_patches(["checkpoint-results-queue"])
    try:
        filesystem_async._get_write_results_queue()
        assert children() > before
    finally:
        filesystem_async._results_queue = None
        registry.apply_patches(on_cuda=False)
        for child in children() - before:
            child.kill()
            child.wait(timeout=10)


def write(path: Path) -> Any:
    """What the writer of one file without tensors puts into its queue."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    box = MemoryFileQueue()
    FileSystemWriterAsync.write_preloaded_data_multiproc([], False, 0, [(str(path), path.name, ([], []))], box)
    return box.get_nowait()


def writers_seen_here(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Writes one file; pids of the writers as this process remembers them: what a forked one notes is lost with it."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    seen: list[int] = []
    original = FileSystemWriterAsync.write_preloaded_data

    def noting(*args: Any, **kwargs: Any) -> None:
        seen.append(os.getpid())
        original(*args, **kwargs)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(noting))
    assert write(path) == {0: []}
    assert path.exists()
    return seen


def test_a_bucket_is_written_by_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert writers_seen_here(tmp_path / "file", monkeypatch) == [os.getpid()]


def test_without_the_patch_another_process_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.revert_patches(["checkpoint-write-in-process"])
    try:
        assert writers_seen_here(tmp_path / "file", monkeypatch) == []
    finally:
        registry.apply_patches(on_cuda=False)


def test_an_error_of_writing_is_the_result(tmp_path: Path) -> None:
    assert isinstance(write(tmp_path / "absent" / "file"), FileNotFoundError)
