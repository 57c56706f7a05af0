"""Experts work without transformer-engine and on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.resilience.patches import registry
from megatron.training import preload  # noqa: F401  (device and patches first)


def gate() -> torch.Tensor:
    from megatron.core.transformer.moe.moe_utils import RouterGatingLinearFunction

    torch.manual_seed(0)
    return RouterGatingLinearFunction.apply(torch.randn(3, 4), torch.randn(2, 4), None, torch.float32)  # type: ignore[no-any-return]


def test_the_router_gates_without_transformer_engine() -> None:
    assert gate().shape == (3, 2)


def test_without_the_patch_the_router_raises() -> None:
    registry.revert_patches(["moe-router-gemm"])
    try:
        with pytest.raises(NameError, match="te_general_gemm"):
            gate()
    finally:
        registry.apply_patches(on_cuda=False)


def test_split_sizes_on_the_cpu_become_numpy() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    splits = torch.tensor([1, 2, 3])
    assert isinstance(token_dispatcher.maybe_move_tensor_to_cpu(splits, as_numpy=True), np.ndarray)
    assert token_dispatcher.maybe_move_tensor_to_cpu(splits) is splits
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_without_the_patch_they_stay_tensors() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    registry.revert_patches(["moe-splits-as-numpy"])
    try:
        assert torch.is_tensor(token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1]), as_numpy=True))
    finally:
        registry.apply_patches(on_cuda=False)
