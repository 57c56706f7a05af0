"""Builds what a rank trains: model chunks under data parallelism, optimizer, schedule. Called once by `pretrain()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module

from megatron.training.checkpoint_facts import schedule_of
from megatron.training.layout import Plan
from megatron.training.transformer_config import aligns_param_gather, ddp_config, optimizer_config, transformer_config


class ModelProvider(Protocol):
    """Builds one model chunk of this rank; `pretrain_gpt.py` has one."""

    def __call__(self, plan: Plan, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
        """The chunk: with the embedding if `pre_process`, with the loss if `post_process`."""


@dataclass(slots=True, kw_only=True)
class Trainee:
    """What a rank trains. `model` has one entry a virtual pipeline stage, wrapped for data parallelism."""

    config: Any
    model: list[Any]
    optimizer: Any
    scheduler: Any

    def modules(self) -> Iterator[Any]:
        """The chunks without their wrappers of precision and data parallelism."""
        for chunk in self.model:
            module = chunk.module
            yield module.module if isinstance(module, Float16Module) else module


def build_trainee(plan: Plan, provider: ModelProvider) -> Trainee:
    """Model, optimizer and schedule of this rank. Collective: parameters are broadcast among data-parallel ranks."""
    config = transformer_config(plan)
    model = [_wrap(plan, config, chunk, index) for index, chunk in enumerate(_chunks(plan, config, provider))]
    if plan.settings.run.data_parallel_random_init:
        for chunk in model:
            chunk.broadcast_params()
    optimizer = get_megatron_optimizer(optimizer_config(plan), model, use_gloo_process_groups=False)
    if plan.settings.optimizer.optimizer == "sgd":
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.init_state_fn = _make_momentum
    trainee = Trainee(config=config, model=model, optimizer=optimizer, scheduler=_scheduler(plan, optimizer))
    _connect_schedule(plan, trainee)
    return trainee


def _make_momentum(optimizer: Any, _config: Any = None) -> None:
    """State of a fresh SGD as its first step would make it: megatron-core makes none, and cannot load without."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


def _chunks(plan: Plan, config: Any, provider: ModelProvider) -> list[Any]:
    chunks = []
    for stage in range(plan.virtual_pipeline_size or 1):
        virtual = {"ignore_virtual": False, "vp_stage": stage} if plan.virtual_pipeline_size else {}
        chunk = provider(
            plan,
            config,
            pre_process=parallel_state.is_pipeline_first_stage(**virtual),
            post_process=parallel_state.is_pipeline_last_stage(**virtual),
            vp_stage=stage if plan.virtual_pipeline_size else None,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk)
    return chunks


def _wrap(plan: Plan, config: Any, chunk: Any, index: int) -> Any:
    if plan.on_cuda:
        chunk.cuda(torch.cuda.current_device())
    if plan.precision != "fp32":
        chunk = Float16Module(config, chunk)
    settings = ddp_config(plan)
    buckets = plan.settings.parallel.ddp_num_buckets
    if buckets:
        settings.bucket_size = max(1, sum(parameter.numel() for parameter in chunk.parameters()) // buckets)
    # Later virtual stages reduce in one bucket: only the first one's reduction has a backward pass to hide behind.
    return DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)


def _scheduler(plan: Plan, optimizer: Any) -> Any:
    settings, schedule = plan.settings.optimizer, schedule_of(plan)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr or 0.0,
        min_lr=settings.min_lr,
        lr_warmup_steps=schedule["warmup_samples"],
        lr_decay_steps=max(1, schedule["decay_samples"] or 0),
        lr_decay_style=settings.lr_decay_style,
        start_wd=schedule["start_weight_decay"],
        end_wd=schedule["end_weight_decay"],
        wd_incr_steps=schedule["weight_decay_samples"],
        wd_incr_style=settings.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=settings.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=settings.override_opt_param_scheduler,
        wsd_decay_steps=schedule["wsd_decay_samples"],
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )


def _connect_schedule(plan: Plan, trainee: Trainee) -> None:
    """Sets the hooks by which megatron-core's pipeline schedules call optimizer and data parallelism."""

    def one_or_all(hooks: list[Callable[..., Any]]) -> Any:
        return hooks[0] if len(hooks) == 1 else hooks

    config, model, parallel = trainee.config, trainee.model, plan.settings.parallel
    config.grad_scale_func = trainee.optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if parallel.overlap_grad_reduce:
        config.no_sync_func = one_or_all([chunk.no_sync for chunk in model])
        if parallel.align_grad_reduce:
            config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in model])
    if aligns_param_gather(plan):
        config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in model])


def gather_parameters(plan: Plan, trainee: Trainee) -> None:
    """Parameters whose gathering was put off to the next forward pass are stale until then: gathers them now.

    Collective. To be called before parameters are read outside a forward pass (save, digest).
    """
    if plan.settings.parallel.overlap_param_gather:
        for chunk in trainee.model:
            chunk.start_param_sync(force_sync=True)
