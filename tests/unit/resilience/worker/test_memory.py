"""What a process holds: each storage once, links without what is in flight, and the peak that the kernel tells."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

import trainmover_ext
from megatron.resilience.worker.memory import link_bytes, look, peak_bytes, tensor_bytes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA counts for itself")


def test_each_storage_counts_once_and_only_while_a_tensor_holds_it() -> None:
    before = tensor_bytes()
    assert tensor_bytes() == before
    one = torch.zeros(1000)
    views = [one[10:], one.view(10, 100), torch.nn.Parameter(one)]
    assert tensor_bytes() == before + 4000
    del one
    assert tensor_bytes() == before + 4000
    views.clear()
    assert tensor_bytes() == before


def test_tensors_that_only_a_cycle_holds_are_not_counted() -> None:
    before = tensor_bytes()
    gc.disable()
    try:
        cycle = [torch.zeros(1000)]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        assert tensor_bytes() == before
    finally:
        gc.enable()


def test_what_operations_hold_for_a_moment_is_no_memory_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"shared_segments": 1, "link_buffers": 20, "flight_recorder": 300, "scratch": 4000, "unexpected_messages": 9}
    monkeypatch.setattr(trainmover_ext, "memory_stats", lambda: held)
    assert link_bytes() == 321


def test_the_peak_is_the_kernels() -> None:
    ballast = torch.ones(64 << 18)
    resident = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    del ballast
    # The kernel counts pages on each processor apart and adds them up now and then: some 200 kB may be missing.
    assert peak_bytes() >= resident - (1 << 20)


class Holding:
    """An inventory that knows of 7 bytes and some scratch."""

    total_bytes = 7

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)

    def scratch(self) -> list[torch.Tensor]:
        return self.tensors


def test_tensors_are_counted_only_where_that_is_asked_for() -> None:
    ballast = torch.zeros(1000)
    held = Holding(ballast)
    assert look(held, counts_tensors=False).tensor_bytes() == 7
    counted = look(held, counts_tensors=True)
    without = counted.tensor_bytes()
    held.tensors.clear()
    assert counted.tensor_bytes() == without + ballast.nbytes, "it was scratch"
