"""A few small calculations whose bits tell which kernels this process computes with.

Libraries choose among kernels by processor, version and environment, and no report of theirs says which: two processors
that both have AVX-512 differ in matrix products of bfloat16 if one has tiles besides. Told among the facts of a rank.
Takes some 10 ms. Inputs come from whole numbers, so no generator of random numbers is touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

_PRODUCTS = ((32, 64, 48), (7, 300, 5), (64, 512, 192))
"""Rows, inner size, columns: full blocks, their edges, and an inner size that is cut into several blocks."""
_ROWS, _COLUMNS = 32, 1000


def arithmetic_lines(device: torch.device) -> list[str]:
    """`float32 softmax=1a2b3c4d` for each calculation: the first 32 bits of SHA-256 of its result."""
    with torch.inference_mode():
        return [f"{name}={_digest(result)}" for name, result in _calculations(device)]


def _calculations(device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        for rows, inner, columns in _PRODUCTS:
            left, right = _numbers(rows, inner).to(device, dtype), _numbers(inner, columns).to(device, dtype)
            name = f"{kind} product {rows}x{inner}x{columns}"
            yield name, left @ right
            yield f"{name} transposed", right.t() @ left.t()
        values = 4 * _numbers(_ROWS, _COLUMNS).to(device, dtype)
        yield f"{kind} softmax", torch.softmax(values, -1)
        yield f"{kind} layer norm", torch.nn.functional.layer_norm(values, (_COLUMNS,))
        yield f"{kind} gelu", torch.nn.functional.gelu(values)
        yield f"{kind} exp", torch.exp(values)
        yield f"{kind} rsqrt", torch.rsqrt(values.abs() + 0.25)
        yield f"{kind} sum", values.sum().reshape(1)
        yield f"{kind} sum of rows", values.sum(1)
        yield f"{kind} sum of columns", values.sum(0)


def _numbers(rows: int, columns: int) -> torch.Tensor:
    """Evenly spread in [-1, 1), exact in float32; the same on every machine."""
    count = torch.arange(1, rows * columns + 1, dtype=torch.int64)
    return (((count * 1103515245) >> 7) % 65536).to(torch.float32).div(32768).sub(1).reshape(rows, columns)


def _digest(result: torch.Tensor) -> str:
    return hashlib.sha256(result.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]
