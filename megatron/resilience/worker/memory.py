"""What memory this process holds now, and the most that it has held. Asked only round a switch: a look takes time.

What operations under way hold for a moment (scratch, messages that came early) is not counted: it says when was looked.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

import trainmover_ext
from megatron.resilience.agent.machine_facts import kernel_bytes

_IN_FLIGHT = frozenset({"scratch", "unexpected_messages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLook:
    """How to look at the memory of a rank; each gives bytes."""

    tensor_bytes: Callable[[], int]
    link_bytes: Callable[[], int]
    peak_bytes: Callable[[], int]


def tensor_bytes(scratch: Iterable[torch.Tensor] = ()) -> int:
    """Of all memory that tensors hold: CUDA's own count where there is CUDA, else each storage once.

    But for `scratch`, whose size is that of the micro-batch that came last.
    """
    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):  # isinstance would ask objects for their class, and wake lazy modules
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    for tensor in scratch:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def link_bytes() -> int:
    """Of links and segments of the data plane."""
    return sum(held for kind, held in trainmover_ext.memory_stats().items() if kind not in _IN_FLIGHT)


def peak_bytes() -> int:
    """The most that this process has held: of CUDA memory, else of resident host memory. 0 where that is not told."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return own_bytes("VmHWM")


def own_bytes(name: str) -> int:
    """What the kernel tells of this process under `name`, as in /proc/PID/status; 0 where it does not."""
    try:
        return kernel_bytes(Path("/proc/self/status").read_text(encoding="utf-8"), name)
    except OSError:
        return 0


class Held(Protocol):
    """What a rank is known to hold: `state.inventory.Inventory`."""

    @property
    def total_bytes(self) -> int:
        """Of weights and optimizer."""

    def scratch(self) -> list[torch.Tensor]:
        """Of the micro-batch that came last."""


def look(held: Held, *, counts_tensors: bool) -> MemoryLook:
    """How to look at this process. Counting tensors stops a rank without CUDA for some 50 ms, so it is done only where
    `counts_tensors`; otherwise `held` tells what is known.
    """
    counts = counts_tensors or torch.cuda.is_available()
    return MemoryLook(
        tensor_bytes=(lambda: tensor_bytes(held.scratch())) if counts else lambda: held.total_bytes,
        link_bytes=link_bytes,
        peak_bytes=peak_bytes,
    )
