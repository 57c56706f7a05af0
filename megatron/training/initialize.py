"""Joins the process to the job: process group, megatron-core's parallel groups, seeds. Called once by `pretrain()`."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.rerun_state_machine import RerunMode, destroy_rerun_state_machine, initialize_rerun_state_machine

from megatron.training.environment import Environment
from megatron.training.layout import Plan


def join_job(plan: Plan, environment: Environment) -> None:
    """Makes WORLD and megatron-core's groups; seeds every generator. Blocks until all ranks are there."""
    if plan.on_cuda:
        torch.cuda.set_device(environment.local_rank)
    parallel = plan.settings.parallel
    torch.distributed.init_process_group(
        plan.backend,
        **_meeting_point(plan, environment),
        rank=environment.global_rank,
        world_size=environment.world_size,
        timeout=timedelta(minutes=parallel.distributed_timeout_minutes),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=plan.virtual_pipeline_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    seed_everything(plan)
    run = plan.settings.run
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    init_num_microbatches_calculator(
        environment.global_rank,
        list(run.rampup_batch_size) if run.rampup_batch_size else None,
        plan.global_batch_size,
        run.micro_batch_size,
        plan.data_parallel_size,
        run.decrease_batch_size_if_needed,
    )


def _meeting_point(plan: Plan, environment: Environment) -> dict[str, Any]:
    """Where the ranks tell each other how they are reached; a rank that is built alone needs no place."""
    if plan.backend == "trainmover":
        # Importing the package registers the backend. Only here: the others work where the extension is not built.
        from torch._C._distributed_c10d import HashStore

        from trainmover_ext.settings import read_settings

        if read_settings().isolated:
            return {"store": HashStore()}
    # torchrun serves the meeting point itself and tells so in its environment, which only env:// reads.
    return {"init_method": "env://" if environment.world_size > 1 else f"tcp://{environment.master_address}:0"}


def seed_everything(plan: Plan) -> None:
    """Seeds python, numpy, torch and the tensor-parallel tracker: another seed a pipeline stage, as in Megatron-LM."""
    run = plan.settings.run
    seed = run.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if run.data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def note_iteration(plan: Plan, iteration: int) -> None:
    """The data plane's records of operations bear `iteration` from now on, where it is ours; 0: none is under way."""
    if plan.backend == "trainmover":
        import trainmover_ext

        trainmover_ext.note_iteration(iteration)


def leave_job() -> None:
    """Takes down what `join_job` made, so that the process can join again. Safe to call when it never joined."""
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
