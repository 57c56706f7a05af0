"""Repair of megatron.core.tensor_parallel.random: selective recompute needs transformer-engine although fp8 is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.resilience.patches.registry import Patch


def _fp8_only_when_asked(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, fp8: Any = False) -> None:
        """As the original, but `fp8=False` (the default of most callers) means no fp8, as `fp8=None` does."""
        original(self, fp8=fp8 or None)

    return init


PATCHES = (
    Patch(
        name="recompute-without-fp8",
        module="megatron.core.tensor_parallel.random",
        attribute="CheckpointWithoutOutput.__init__",
        why="False counts as 'fp8 wanted', so recompute of layernorm and MoE activations calls transformer-engine "
        "names that are unbound without it",
        versions=">=0.16,<0.17",
        sources=("72036565b77136f2",),
        make=_fp8_only_when_asked,
    ),
)
