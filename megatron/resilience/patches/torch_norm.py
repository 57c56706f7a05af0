"""Repair of megatron.core.transformer.torch_norm: the local layer spec refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch

from megatron.resilience.patches.registry import Patch

_NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


def _norm_that_marks_its_parameters(original: Any) -> Any:
    """`original` is the static `WrappedTorchNorm.__new__`; its replacement builds a torch norm.

    Input and output of the norm: [sequence / tp, batch, hidden] with sequence parallelism. The mark
    `sequence_parallel` makes megatron-core sum the parameters' gradients over the tensor-parallel ranks.
    """

    def make_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        if not config.sequence_parallel or config.normalization not in _NORMS:
            return original(cls, config, hidden_size, eps, **kwargs)
        norm = _NORMS[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return staticmethod(make_norm)


PATCHES = (
    Patch(
        name="sequence-parallel-norm",
        module="megatron.core.transformer.torch_norm",
        attribute="WrappedTorchNorm.__new__",
        why="torch's own norms are refused with sequence parallelism although only a mark on the parameters is missing",
        versions=">=0.16,<0.17",
        sources=("6cb54a06fa41bf78",),
        make=_norm_that_marks_its_parameters,
    ),
)
