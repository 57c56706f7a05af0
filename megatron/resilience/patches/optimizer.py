"""Repair of megatron.core.optimizer for a rank that is built alone: it groups parameters as the whole job does.

Ranks tell each other the kinds of parameters that they have (decayed or not, of experts or not), so that all have the
same groups, with nothing in some of them. A rank alone hears of its own kinds only: one of a stage without experts made
no optimizer for experts, while the rank whose place it takes has one. Here kinds that other stages have are made up
from the configuration, and megatron-core sorts them as it would their parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.resilience.patches.gpt_dataset import is_alone
from megatron.resilience.patches.registry import Patch

Groups = list[dict[str, Any]]


def _alone(build: Callable[..., Groups]) -> Callable[..., Groups]:
    def get_param_groups(model_chunks: list[Any], config: Any, config_overrides: Any) -> Groups:
        """As the original; a rank that is alone has the groups of other stages too, empty."""
        if not is_alone():
            return build(model_chunks, config, config_overrides)
        others = _kinds_of_all_stages(model_chunks[0].config)
        groups = build([*model_chunks, others], config, config_overrides)
        made_up = {id(parameter) for parameter in others.parameters()}
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in made_up]
        return groups

    return get_param_groups


def _kinds_of_all_stages(config: Any) -> torch.nn.Module:
    """One parameter of each kind that some stage has, without memory."""
    kinds = torch.nn.Module()
    kinds.layer = _layer(bias=True)
    kinds.embedding = _layer(bias=False, is_embedding_or_output_parameter=True)
    frequency = config.moe_layer_freq
    has_experts = config.num_moe_experts and (isinstance(frequency, int) or any(frequency))
    if has_experts and config.expert_model_parallel_size > 1:  # megatron-core's criterion for groups of their own
        kinds.experts = _layer(bias=config.add_bias_linear, allreduce=False)
    return kinds


def _layer(*, bias: bool, **marks: bool) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.empty(1, 1, device="meta"))
    if bias:
        layer.bias = torch.nn.Parameter(torch.empty(1, device="meta"))
    for parameter in layer.parameters():
        for name, value in marks.items():
            setattr(parameter, name, value)
    return layer


PATCHES = (
    Patch(
        name="optimizer-groups-alone",
        module="megatron.core.optimizer",
        attribute="_get_param_groups",
        why="ranks gather the kinds of all ranks' parameters; a joiner of a stage without experts has no optimizer for "
        "experts, as the rank it stands for has",
        versions=">=0.16,<0.17",
        sources=("cccb88ccace96e07",),
        make=_alone,
    ),
)
