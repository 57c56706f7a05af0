"""Repairs of megatron.core.optimizer.distrib_optimizer: loading a checkpoint without transformer-engine or apex.

As shipped, torch's own Adam keeps a `step` in each parameter's state, which the loaders do not know: every
sharding format fails, and past that all parameters come to share one `step` tensor, so that one optimizer step
counts as many and the resumed run drifts away silently.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.resilience.patches.registry import Patch

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"


def _with_state_made_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def sharded_state_dict(
        self: Any,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """As the original; when loading into a fresh torch optimizer, its state is made before it is described."""
        if is_loading:
            make_optimizer_state(self.optimizer)
        return original(self, model_sharded_state_dict, is_loading, sharding_type, metadata)

    return sharded_state_dict


def make_optimizer_state(optimizer: Any) -> None:
    """Gives each parameter of a torch Adam the zeroed state that its first step would make; leaves others alone."""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is an Adam
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }


def _copy_known_tensors(original: Callable[..., None]) -> Callable[..., None]:
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        """As the original, but a torch optimizer's `step`, which no checkpoint holds per parameter, is skipped."""
        group_index, group_order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group_index]["params"][group_order]
        state = self.optimizer.state.get(main_param, {})
        if "step" not in state:
            original(self, model_param, tensors)
            return
        with torch.no_grad():
            for key, target in {"param": main_param, **state}.items():
                if key != "step":
                    target.copy_(tensors[key])

    return _set_main_param_and_optimizer_states


def _own_steps(original: Callable[..., None]) -> Callable[..., None]:
    def load_state_dict(self: Any, state_dict: Any) -> None:
        """As the original; afterwards each parameter has a `step` tensor of its own."""
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    return load_state_dict


def _at_unpadded_offsets(original: Callable[..., Any]) -> Callable[..., Any]:
    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As the original, with each parameter's place in the gathered state, which has no padding between buckets."""
        with contextlib.ExitStack() as stack:
            for buffer in self.buffers:
                stack.enter_context(_unpadded_index(buffer))
            return original(self, *args, **kwargs)

    return sharded_param_state_fully_reshardable


@contextlib.contextmanager
def _unpadded_index(buffer: Any) -> Iterator[None]:
    """For a while, `buffer.param_index_map` counts elements as if no bucket were padded."""
    padded = buffer.param_index_map
    ends = itertools.accumulate(bucket.numel_unpadded for bucket in buffer.buckets)
    starts = [0, *ends]
    shifts = [start - padded_start for start, (padded_start, _) in zip(starts, buffer.bucket_indices, strict=False)]
    buffer.param_index_map = {
        parameter: (start + shifts[bucket], end + shifts[bucket], bucket)
        for parameter, (start, end, bucket) in padded.items()
    }
    try:
        yield
    finally:
        buffer.param_index_map = padded


PATCHES = (
    Patch(
        name="optimizer-save-unpadded",
        module=_OPTIMIZER,
        attribute="DistributedOptimizer.sharded_param_state_fully_reshardable",
        why="the gathered state leaves out padding between buckets, the offsets into it count it: parameters behind "
        "a padded bucket (tied embeddings, several buckets) are saved shifted, silently",
        versions=">=0.16,<0.17",
        sources=("e888c7cccb71525a",),
        make=_at_unpadded_offsets,
    ),
    Patch(
        name="optimizer-state-before-load",
        module=_OPTIMIZER,
        attribute="DistributedOptimizer.sharded_state_dict",
        why="a fresh torch optimizer has no state, and every sharding format describes what it is about to load by it",
        versions=">=0.16,<0.17",
        sources=("2d70893ff7c08a35",),
        make=_with_state_made_first,
    ),
    Patch(
        name="optimizer-load-skips-step",
        module=_OPTIMIZER,
        attribute="DistributedOptimizer._set_main_param_and_optimizer_states",
        why="the loaders ask the checkpoint for a `step` of each parameter, which only param_groups hold",
        versions=">=0.16,<0.17",
        sources=("93c254228283b2df",),
        make=_copy_known_tensors,
    ),
    Patch(
        name="optimizer-own-steps",
        module=_OPTIMIZER,
        attribute="DistributedOptimizer.load_state_dict",
        why="all parameters share one step tensor after a load, so each optimizer step advances it once a parameter: "
        "the resumed run differs silently",
        versions=">=0.16,<0.17",
        sources=("15f257b4c4f9a7ef",),
        make=_own_steps,
    ),
)
