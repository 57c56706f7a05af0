"""Norm of all parameters of the model, whatever the layout (`--log-params-norm`). Called by `loop.py`."""

from __future__ import annotations

import math

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron.training.layout import Plan
from megatron.training.model_setup import Trainee, gather_parameters


def parameter_norm(plan: Plan, trainee: Trainee) -> float:
    """L2 norm of the whole model, each parameter counted once. Collective; summed in double precision.

    Parameters that ranks share (norms, tied embeddings) count on one of them; experts of a rank's own count in theirs.
    """
    gather_parameters(plan, trainee)
    sums = {is_expert: torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device()) for is_expert in (0, 1)}
    for chunk in trainee.model:
        for parameter in chunk.parameters():
            is_expert = not getattr(parameter, "allreduce", True)
            group = parallel_state.get_expert_tensor_parallel_group() if is_expert else None
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, group):
                sums[is_expert] += parameter.detach().float().norm().double() ** 2
    torch.distributed.all_reduce(sums[0], group=parallel_state.get_model_parallel_group())
    torch.distributed.all_reduce(sums[1], group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return math.sqrt(float(sums[0] + sums[1]))
