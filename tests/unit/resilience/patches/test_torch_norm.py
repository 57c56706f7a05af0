"""The local layer spec's norms work with sequence parallelism: their gradients are marked to be summed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.resilience.patches import registry
from megatron.training import preload  # noqa: F401  (device and patches first)


def make_norm(*, sequence_parallel: bool, normalization: str) -> torch.nn.Module:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config: Any = SimpleNamespace(
        sequence_parallel=sequence_parallel,
        normalization=normalization,
        layernorm_zero_centered_gamma=False,
        persist_layer_norm=False,
        memory_efficient_layer_norm=False,
    )
    norm: Any = WrappedTorchNorm(config, 8, 1e-6)
    assert isinstance(norm, torch.nn.Module)
    return norm


@pytest.mark.parametrize(("name", "kind"), [("LayerNorm", torch.nn.LayerNorm), ("RMSNorm", torch.nn.RMSNorm)])
def test_norms_mark_their_parameters_under_sequence_parallelism(name: str, kind: type) -> None:
    norm = make_norm(sequence_parallel=True, normalization=name)
    assert isinstance(norm, kind)
    assert norm.eps == 1e-6
    assert all(parameter.sequence_parallel for parameter in norm.parameters())  # type: ignore[attr-defined]


def test_norms_are_as_before_without_sequence_parallelism() -> None:
    norm = make_norm(sequence_parallel=False, normalization="LayerNorm")
    assert not any(hasattr(parameter, "sequence_parallel") for parameter in norm.parameters())


def test_without_the_patch_sequence_parallelism_is_refused() -> None:
    registry.revert_patches(["sequence-parallel-norm"])
    try:
        with pytest.raises(AssertionError, match="sequence parallel not supported"):
            make_norm(sequence_parallel=True, normalization="LayerNorm")
    finally:
        registry.apply_patches(on_cuda=False)
