"""What every reduction must give, to the bit: in one process, from the words of csrc/collectives/reduction_order.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
_HALVES = (torch.float16, torch.bfloat16)
_RING_BYTES_PER_RANK = 64 << 10
_SLICE_ALIGNMENT = 16


def operations(dtype: torch.dtype) -> tuple[str, ...]:
    """Defined for elements of `dtype`."""
    return ("sum", "product", "min", "max", *(("avg",) if dtype in FLOATS else ("band", "bor", "bxor")))


def all_reduce(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The result on every rank; `inputs[r]` is what group rank r gives."""
    count, size = inputs[0].numel(), len(inputs)
    if not _by_ring(count * inputs[0].element_size(), size):
        return _tree(inputs, op)
    part = (count + size - 1) // size
    part = (part + _SLICE_ALIGNMENT - 1) // _SLICE_ALIGNMENT * _SLICE_ALIGNMENT
    slices = [slice(min(count, part * owner), min(count, part * (owner + 1))) for owner in range(size)]
    return torch.cat([_ring([given[cut] for given in inputs], op, owner) for owner, cut in enumerate(slices)])


def reduce(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The result at root."""
    return _tree(inputs, op)


def reduce_scatter(inputs: Sequence[Sequence[torch.Tensor]], op: str, rank: int) -> torch.Tensor:
    """The result of group rank `rank`; `inputs[r][i]` is what rank r gives for rank i."""
    whole = sum(piece.numel() * piece.element_size() for piece in inputs[0])
    pieces = [given[rank] for given in inputs]
    return _ring(pieces, op, rank) if _by_ring(whole, len(inputs)) else _tree(pieces, op)


def _by_ring(whole_bytes: int, size: int) -> bool:
    return whole_bytes >= _RING_BYTES_PER_RANK * size


def _tree(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    size = len(inputs)
    if size == 1:
        return inputs[0].clone()
    x = [_widened(given) for given in inputs]
    width = 1 << (size.bit_length() - 1)
    for rank in range(size - width):
        x[rank] = _combined(x[rank], x[rank + width], op)
    distance = width // 2
    while distance >= 1:
        for rank in range(distance):
            x[rank] = _combined(x[rank], x[rank + distance], op)
        distance //= 2
    return _finished(x[0], inputs[0].dtype, op, size)


def _ring(inputs: Sequence[torch.Tensor], op: str, owner: int) -> torch.Tensor:
    size = len(inputs)
    if size == 1:
        return inputs[0].clone()
    result = _widened(inputs[(owner + 1) % size])
    for step in range(2, size + 1):
        result = _combined(result, _widened(inputs[(owner + step) % size]), op)
    return _finished(result, inputs[0].dtype, op, size)


def _widened(elements: torch.Tensor) -> Array:
    """16-bit floats are summed in 32 bits."""
    return (elements.float() if elements.dtype in _HALVES else elements).numpy()


def _finished(accumulator: Array, dtype: torch.dtype, op: str, size: int) -> torch.Tensor:
    if op == "avg":
        accumulator = accumulator / accumulator.dtype.type(size)
    return torch.from_numpy(np.ascontiguousarray(accumulator)).to(dtype)


def _combined(a: Array, b: Array, op: str) -> Array:
    if a.dtype == np.bool_:
        return _combined_truths(a, b, op)
    with np.errstate(all="ignore"):
        if op in ("sum", "avg"):
            return np.asarray(a + b)
        if op == "product":
            return np.asarray(a * b)
        if op == "min":
            return np.where(b < a, b, a)
        if op == "max":
            return np.where(b > a, b, a)
    bits = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
    return np.asarray(bits[op](a, b))


def _combined_truths(a: Array, b: Array, op: str) -> Array:
    if op == "bxor":
        return np.asarray(a ^ b)
    return np.asarray(a | b if op in ("sum", "max", "bor") else a & b)
