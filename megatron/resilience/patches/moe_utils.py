"""Repairs of megatron.core.transformer.moe.moe_utils where transformer-engine is absent and the device is the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.resilience.patches.registry import Patch

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


def _no_gemm(original: Any) -> Any:
    """transformer-engine's GEMM where it was imported, None where it was not: callers test for None."""
    return original


def _move_to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """As the original, and a tensor that is on the CPU already becomes numpy too when `as_numpy` asks for it."""
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    return maybe_move_tensor_to_cpu


PATCHES = (
    Patch(
        name="moe-router-gemm",
        module="megatron.core.transformer.moe.moe_utils",
        attribute="te_general_gemm",
        why="the name is only bound when transformer-engine imports; the router's gating raises NameError without it",
        versions=">=0.16,<0.17",
        make=_no_gemm,
        may_be_missing=True,
    ),
    Patch(
        name="moe-splits-as-numpy",
        module=_DISPATCHER,
        attribute="maybe_move_tensor_to_cpu",
        why="split sizes of the all-to-all dispatcher stay tensors when they are on the CPU already: no valid splits",
        versions=">=0.16,<0.17",
        sources=("8fc5847a887d7319",),
        make=_move_to_cpu,
        cpu_only=True,
    ),
)
