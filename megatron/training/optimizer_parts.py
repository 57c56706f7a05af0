"""Optimizer state from a layout with another number of optimizers. Pure: works on nested dicts; called when loading.

megatron-core keeps one optimizer for all parameters, or two when experts have a data-parallel group of their own
(expert parallelism). Tensors are saved by parameter name and fit either; the values beside them (learning rates,
step, loss scale) are saved by optimizer, and are brought into the wanted number of parts here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAME_GROUP = ("wd_mult", "lr_mult", "is_decoupled_lr")


def fit_parts(loaded: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> dict[Any, Any]:
    """`loaded` with as many parts as `wanted`, the state dict that described what to load.

    Raises ValueError when a wanted parameter group has no counterpart in the checkpoint.
    """
    saved_parts, wanted_parts = _parts(loaded), _parts(wanted)
    if len(saved_parts) == len(wanted_parts):
        return dict(loaded)
    saved_groups = [group for part in saved_parts.values() for group in _holder(part)["param_groups"]]
    fitted = {key: _fit_part(loaded, key, part, saved_parts, saved_groups) for key, part in wanted_parts.items()}
    return fitted.get(None, fitted)


def _parts(state: Mapping[Any, Any]) -> dict[int | None, Mapping[Any, Any]]:
    """Parts by number, or the whole under None when there is only one; only those whose groups tell their rates.

    Where the numbers of parts differ, a load leaves tensors in the wanted places and the rest in the saved ones.
    """
    if _has_groups(state):
        return {None: state}
    return {key: state[key] for key in sorted(key for key in state if isinstance(key, int)) if _has_groups(state[key])}


def _has_groups(part: Mapping[Any, Any]) -> bool:
    groups = _holder(part).get("param_groups", ())
    return bool(groups) and all("lr" in group for group in groups)


def _holder(part: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Where a part keeps its param_groups: below "optimizer" in mixed precision and distributed optimizers."""
    inner = part.get("optimizer", part)
    return inner if isinstance(inner, Mapping) else part


def _fit_part(
    loaded: Mapping[Any, Any],
    key: int | None,
    wanted: Mapping[Any, Any],
    saved_parts: Mapping[int | None, Mapping[Any, Any]],
    saved_groups: list[Mapping[str, Any]],
) -> dict[Any, Any]:
    first_saved = next(iter(saved_parts.values()))
    tensors = loaded if key is None else loaded[key]
    part = {name: tensors.get(name, first_saved.get(name)) for name in wanted}
    inner = dict(_holder(first_saved))
    inner["param_groups"] = [_counterpart(group, saved_groups) for group in _holder(wanted)["param_groups"]]
    for group, local in zip(inner["param_groups"], _holder(tensors).get("param_groups", ()), strict=False):
        group |= {name: local[name] for name in ("params",) if name in local}
    if "state" in _holder(wanted):  # a plain optimizer: tensors by parameter, and one step for all
        state = dict(_holder(tensors).get("state", {}))
        common_step = _holder(first_saved).get("state", {}).get("common_step")
        inner["state"] = state if common_step is None else {**state, "common_step": common_step}
    if "optimizer" in wanted:
        return {**part, "optimizer": inner}
    return {**part, **inner}


def _counterpart(wanted: Mapping[str, Any], saved_groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The saved group of the same multipliers, best one of the same kind of parameters, with the wanted identity."""
    same = [group for group in saved_groups if all(group.get(name) == wanted.get(name) for name in _SAME_GROUP)]
    if not same:
        found = {name: wanted.get(name) for name in _SAME_GROUP}
        raise ValueError(f"the checkpoint has no parameter group with {found}; add --no-load-optim")
    same.sort(key=lambda group: group.get("is_expert_parallel") != wanted.get("is_expert_parallel"))
    return {**same[0], "is_expert_parallel": wanted.get("is_expert_parallel")}
