"""The routers' auxiliary losses, gathered for the log. Called by `step.py` once an iteration where experts have any.

megatron-core keeps them by layer in a tracker that only grows until somebody reads it; its own reader averages in the
collective, which gloo cannot.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

from megatron.training.layout import Plan


def tracked_names(plan: Plan) -> tuple[str, ...]:
    """Names of the losses that the settings turn on, as megatron-core and Megatron-LM's log have them."""
    moe = plan.settings.moe
    if moe.num_experts is None:
        return ()
    balancing = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
    name = balancing.get(moe.moe_router_load_balancing_type) if moe.moe_aux_loss_coeff > 0 else None
    return tuple(loss for loss in (name, "z_loss" if moe.moe_z_loss_coeff else None) if loss)


def gather_moe_losses(plan: Plan, microbatches: int) -> dict[str, float]:
    """Mean over layers, micro-batches and data-parallel ranks of each loss since the last call. Collective."""
    tracker = get_moe_layer_wise_logging_tracker()
    layers = max(1, sum(plan.moe_layer_pattern))
    losses = {name: _gather(plan, tracker.get(name, {})) / (layers * microbatches) for name in tracked_names(plan)}
    if tracker:
        clear_aux_losses_tracker()
    return losses


def _gather(plan: Plan, entry: dict[str, object]) -> float:
    """Sum over all layers of one loss: stages hold their own layers, and a group may hold parts of one layer's."""
    values = entry.get("values")
    total = torch.zeros(1, device=torch.cuda.current_device())
    if isinstance(values, torch.Tensor):
        total += values.sum()
    for key, averages in (("reduce_group", False), ("avg_group", True)):
        group = entry.get(key)
        if isinstance(group, torch.distributed.ProcessGroup):
            torch.distributed.all_reduce(total, group=group)
            if averages:
                total /= group.size()
    torch.distributed.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    if not entry.get("reduce_group_has_dp"):
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        total /= plan.data_parallel_size
    return float(total)
