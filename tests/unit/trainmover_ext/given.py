"""What the ranks of operations.py give each other, and the register of its checks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

CHECKS: dict[str, Callable[[], None]] = {}
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
COUNTS = (0, 1, 7, 1000, 70_001)


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def given(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What `rank` gives: small whole numbers, whose sums are exact in every type. Of 4 ranks at most, for int8."""
    return ((torch.arange(count) * 7 + rank * 3) % 8 + 1).to(dtype)


def all_given(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [given(rank, count, dtype) for rank in range(dist.get_world_size())]


def cut(tensor: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    return [tensor[sum(counts[:index]) :][:count] for index, count in enumerate(counts)]


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def expect(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
