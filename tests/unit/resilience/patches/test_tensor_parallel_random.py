"""Selective recompute asks for fp8 only when fp8 is wanted."""

from __future__ import annotations

import pytest

from megatron.resilience.patches import registry
from megatron.training import preload  # noqa: F401  (device and patches first)


@pytest.mark.parametrize(("wanted", "fp8"), [(False, False), (None, False), ("e4m3", True)])
def test_fp8_is_on_only_when_wanted(wanted: object, fp8: bool) -> None:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    assert CheckpointWithoutOutput(fp8=wanted).fp8 is fp8


def test_without_the_patch_false_counts_as_wanted() -> None:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    registry.revert_patches(["recompute-without-fp8"])
    try:
        assert CheckpointWithoutOutput(fp8=False).fp8 is True
    finally:
        registry.apply_patches(on_cuda=False)
