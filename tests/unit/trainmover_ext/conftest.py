"""One process alone, posing as a rank of a larger job: what isolated mode is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import trainmover_ext

RANK, SIZE = 5, 8


@pytest.fixture
def start_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Makes this process rank 5 of 8 when called; ended after the test."""
    monkeypatch.setenv("TRAINMOVER_MODE", "isolated")

    def start() -> None:
        dist.init_process_group("trainmover", store=HashStore(), rank=RANK, world_size=SIZE)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
    trainmover_ext.shutdown()


@pytest.fixture
def start_single(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Makes this process the only rank of a live job when called; ended after the test."""
    monkeypatch.delenv("TRAINMOVER_MODE", raising=False)
    yield lambda: dist.init_process_group("trainmover", store=HashStore(), rank=0, world_size=1)
    if dist.is_initialized():
        dist.destroy_process_group()
    trainmover_ext.shutdown()


@pytest.fixture
def alone(start_alone: Callable[[], None]) -> None:
    """This process is rank 5 of 8."""
    start_alone()
