"""Repairs of megatron.core.datasets for a rank that is built alone: it makes missing indices itself.

As shipped, global rank 0 makes the indices of the samples and all others load them after a barrier. A rank that joins a
running job on a machine without these files has no rank 0 to wait for, and fails. Here, in a data plane in mode
isolated, each rank takes rank 0's part; ranks of one machine take turns by a lock beside the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.resilience.patches.registry import Patch

LOCK_LIMIT_S = 1800.0
_POLL_S = 0.05
_LOCK_NAME = "joining.lock"
_replacing = threading.Lock()
_replaced: list[Any] = []
"""torch's own answer, while some thread is the first rank."""
_inside: list[int] = []
"""Threads that are, as often as they have become it."""


def is_alone() -> bool:
    """Whether the data plane of this process runs, and in mode isolated."""
    rendezvous = sys.modules.get("trainmover_ext.rendezvous")
    current = rendezvous.process_rendezvous.current() if rendezvous is not None else None
    return current is not None and bool(current.runtime.isolated)


@contextlib.contextmanager
def as_first_rank() -> Iterator[None]:
    """For a while this thread is rank 0 of the job when it asks torch; in groups it stays what it is.

    Blends are built in several threads at once: the first to come replaces the question, the last to go puts it back.
    """
    with _replacing:
        if not _replaced:
            _replaced.append(torch.distributed.get_rank)
            torch.distributed.get_rank = _rank_in_this_thread(_replaced[0])
        _inside.append(threading.get_ident())
    try:
        yield
    finally:
        with _replacing:
            _inside.remove(threading.get_ident())
            if not _inside:
                torch.distributed.get_rank = _replaced.pop()


def _rank_in_this_thread(original: Callable[[Any], int]) -> Any:
    def get_rank(group: Any = None) -> int:
        return 0 if group is None and threading.get_ident() in _inside else original(group)

    return get_rank


@contextlib.contextmanager
def turn_in(folder: Path, *, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """One process at a time. Raises TimeoutError when another one does not get done within `limit_s`."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + limit_s
    with (folder / _LOCK_NAME).open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"another process has held {folder / _LOCK_NAME} for {limit_s:g} s; it makes indices of the "
                        "data: look whether it hangs"
                    ) from error
                time.sleep(_POLL_S)
        yield


def _alone(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build_or_load(self: Any) -> Any:
        """As the original; a rank that is alone makes what is missing."""
        if not is_alone():
            return build(self)
        with contextlib.ExitStack() as stack:
            folder = _cache_folder(self)
            if folder is not None and os.access(_existing(folder), os.W_OK):
                stack.enter_context(turn_in(folder))
            stack.enter_context(as_first_rank())
            return build(self)

    return build_or_load


def _cache_folder(dataset: Any) -> Path | None:
    """Where `dataset` keeps its indices; None for one that keeps none."""
    if dataset.config.path_to_cache:
        return Path(dataset.config.path_to_cache)
    prefix = getattr(getattr(dataset, "dataset", None), "path_prefix", None)
    if prefix is None or dataset.config.mock:
        return None
    return Path(prefix) / "cache" / f"{type(dataset).__name__}_indices"


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


PATCHES = (
    Patch(
        name="dataset-indices-alone",
        module="megatron.core.datasets.gpt_dataset",
        attribute="GPTDataset._build_document_sample_shuffle_indices",
        why="only global rank 0 makes indices that are missing; a joiner of another rank loads what nobody wrote",
        versions=">=0.16,<0.17",
        sources=("4666400c4de717a3",),
        make=_alone,
    ),
    Patch(
        name="blended-indices-alone",
        module="megatron.core.datasets.blended_dataset",
        attribute="BlendedDataset._build_indices",
        why="the same for a blend of several data sets",
        versions=">=0.16,<0.17",
        sources=("5823c03a5159d9eb",),
        make=_alone,
    ),
)
