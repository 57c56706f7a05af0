"""Repairs of megatron.core.dist_checkpointing.strategies.filesystem_async: how a rank writes its checkpoint files.

As shipped, every rank spawns a manager process (seconds, and an orphan when the rank is killed) only to carry one
list of results, and forks one more process per file whose death is waited for without a bound. Here a rank writes
its files in the process that asked for it (the forked saver of an asynchronous save, or the rank itself), and the
results travel through an anonymous memory file that vanishes with its last holder.
"""

from __future__ import annotations

import os
import pickle
import queue
from collections.abc import Callable
from typing import Any

from megatron.resilience.patches.registry import Patch

_MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"


class MemoryFileQueue:
    """A first-in-first-out queue between a process and the ones it forks later; one writer at a time.

    `put` never blocks whatever the size; `get_nowait` raises queue.Empty. Backed by a memfd: no process, no thread,
    no name in any file system.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("checkpoint-results", os.MFD_CLOEXEC)
        self._read_offset = 0

    def put(self, item: Any) -> None:
        """Appends `item`, pickled, with its length in 8 bytes before it."""
        payload = pickle.dumps(item)
        record = memoryview(len(payload).to_bytes(8, "little") + payload)
        offset = os.fstat(self._descriptor).st_size
        while record:
            written = os.pwrite(self._descriptor, record, offset)
            record, offset = record[written:], offset + written

    def get_nowait(self) -> Any:
        """The oldest item not yet read by this process; queue.Empty when there is none or it is not whole."""
        header = os.pread(self._descriptor, 8, self._read_offset)
        size = int.from_bytes(header, "little")
        payload = os.pread(self._descriptor, size, self._read_offset + 8) if len(header) == 8 else b""
        if len(header) < 8 or len(payload) < size:
            raise queue.Empty
        self._read_offset += 8 + size
        return pickle.loads(payload)

    def __del__(self) -> None:
        os.close(self._descriptor)


class _OneWorker:
    """The two queues that `write_preloaded_data` wants of its parent, for a caller that is its own worker."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def put(self, result: Any) -> None:
        self.results.append(result)

    def get(self) -> None: ...

    def task_done(self) -> None: ...


def _new_queue(_original: Callable[[], Any]) -> Callable[[], MemoryFileQueue]:
    """A queue a save instead of one manager process a rank."""
    return MemoryFileQueue


def _write_in_this_process(_original: Any) -> Any:
    def write_preloaded_data_multiproc(
        transforms: list[Any], use_msc: bool, _global_rank: int, write_buckets: list[Any], results_queue: Any
    ) -> None:
        """Writes each bucket's file one after the other and puts {index: results}, or the first exception."""
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        outcome: Any = {}
        for index, bucket in enumerate(write_buckets):
            worker = _OneWorker()
            FileSystemWriterAsync.write_preloaded_data(
                transforms, index, bucket, worker, worker, use_fsync=True, use_msc=use_msc
            )
            _, results = worker.results[0]
            if isinstance(results, Exception):
                outcome = results
                break
            outcome[index] = results
        results_queue.put(outcome)

    return staticmethod(write_preloaded_data_multiproc)


PATCHES = (
    Patch(
        name="checkpoint-results-queue",
        module=_MODULE,
        attribute="_get_write_results_queue",
        why="a manager process a rank costs seconds at the first save and outlives a killed rank",
        versions=">=0.16,<0.17",
        sources=("349269cbdd569d41",),
        make=_new_queue,
    ),
    Patch(
        name="checkpoint-write-in-process",
        module=_MODULE,
        attribute="FileSystemWriterAsync.write_preloaded_data_multiproc",
        why="a writer process that dies leaves its rank waiting without a bound",
        versions=">=0.16,<0.17",
        sources=("bef05e8d525e7eed",),
        make=_write_in_this_process,
    ),
)
