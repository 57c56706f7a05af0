"""One iteration: forward and backward over all micro-batches, optimizer step, schedule; and one evaluation.

Called by `loop.py` alone, which casts its vote on switching machines just before the optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.training.data import BatchSource
from megatron.training.layout import Plan
from megatron.training.model_setup import Trainee
from megatron.training.moe_losses import gather_moe_losses, tracked_names
from megatron.training.transformer_config import checks_for_nan

ForwardStep = Callable[[BatchSource, Any], tuple[torch.Tensor, Callable[[torch.Tensor], Any]]]


class NotANumberError(RuntimeError):
    """The loss is infinite or not a number although nothing scales it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one iteration gave. `losses` is empty but on ranks of the last stage; `skipped` says that the optimizer
    found a gradient overflow (fp16) and changed nothing.
    """

    losses: dict[str, float]
    grad_norm: float | None
    zeros_in_grad: int | None
    learning_rate: float
    loss_scale: float
    samples: int
    skipped: bool


def train_step(
    plan: Plan,
    trainee: Trainee,
    sources: Sequence[BatchSource],
    forward_step: ForwardStep,
    iteration: int,
    *,
    before_update: Callable[[], None],
) -> StepResult:
    """Trains on one global batch; `before_update` is called when nothing but the optimizer step is left.

    Collective. Raises NotANumberError where the settings ask for the check.
    """
    for chunk in trainee.model:
        chunk.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    losses = _average(_run(plan, trainee, sources, forward_step, forward_only=False))
    if checks_for_nan(plan) and not all(math.isfinite(loss) for loss in losses.values()):
        raise NotANumberError(f"iteration {iteration}: loss is {losses}; lower --lr, or look at the data")
    auxiliary = gather_moe_losses(plan, get_num_microbatches()) if tracked_names(plan) else {}
    if losses:
        losses |= auxiliary
    before_update()
    succeeded, grad_norm, zeros = trainee.optimizer.step()
    samples = get_num_microbatches() * (plan.settings.run.micro_batch_size or 1) * plan.data_parallel_size
    if succeeded:
        trainee.scheduler.step(increment=samples)
    return StepResult(
        losses=losses,
        grad_norm=None if grad_norm is None else float(grad_norm),
        zeros_in_grad=None if zeros is None else int(zeros),
        learning_rate=current_learning_rate(trainee),
        loss_scale=float(trainee.optimizer.get_loss_scale().item()),
        samples=samples,
        skipped=not succeeded,
    )


def evaluate(
    plan: Plan, trainee: Trainee, sources: Sequence[BatchSource], forward_step: ForwardStep
) -> tuple[dict[str, float], int]:
    """(mean losses on the last stage, samples consumed) over `--eval-iters` batches, without dropout. Collective."""
    for chunk in trainee.model:
        chunk.eval()
    totals: dict[str, float] = {}
    run = plan.settings.run
    for _ in range(run.eval_iters):
        with torch.no_grad():
            losses = _average(_run(plan, trainee, sources, forward_step, forward_only=True))
        for name, value in losses.items():
            totals[name] = totals.get(name, 0.0) + value / run.eval_iters
    for chunk in trainee.model:
        chunk.train()
    return totals, run.eval_iters * plan.global_batch_size


def current_learning_rate(trainee: Trainee) -> float:
    """Learning rate of the next optimizer step."""
    groups = [group for group in trainee.optimizer.param_groups if group.get("default_config", True)]
    return float(groups[0]["lr"]) if groups else 0.0


def _run(
    plan: Plan, trainee: Trainee, sources: Sequence[BatchSource], forward_step: ForwardStep, *, forward_only: bool
) -> list[dict[str, torch.Tensor]]:
    run = plan.settings.run
    microbatches = get_num_microbatches()
    if forward_only:
        microbatches = plan.global_batch_size // ((run.micro_batch_size or 1) * plan.data_parallel_size)
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(sources) if len(trainee.model) > 1 else sources[0],
        model=trainee.model,
        num_microbatches=microbatches,
        seq_length=plan.settings.data.seq_length,
        micro_batch_size=run.micro_batch_size,
        forward_only=forward_only,
    )
    return list(reports)


def _average(reports: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Mean of each loss over its tokens on all data-parallel ranks: each report holds [sum, tokens]."""
    means = {}
    for name in reports[0] if reports else ():
        total = torch.stack([report[name].double() for report in reports]).sum(dim=0)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        means[name] = (total[0] / total[1].clamp(min=1)).item()
    return means
