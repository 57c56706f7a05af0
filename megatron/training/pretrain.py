"""`pretrain()`: one rank's life from command line to exit code. Called by `pretrain_gpt.py` on every rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron.training import (
    device,
    preload,  # noqa: F401  (device, patches and megatron-core, in that order)
)
from megatron.training.checkpointing import Checkpointer, Progress
from megatron.training.config import SettingsError
from megatron.training.data import DatasetsProvider, check_enough_samples, dataset_sizes
from megatron.training.ending import EndingWatch
from megatron.training.environment import Environment, read_environment
from megatron.training.initialize import join_job, leave_job, note_iteration
from megatron.training.layout import Plan
from megatron.training.loop import Datasets, TrainingLoop
from megatron.training.membership import FixedMembership, Membership
from megatron.training.model_setup import ModelProvider, Trainee, build_trainee, gather_parameters
from megatron.training.preflight import EXIT_USAGE, plan_run, usage_line
from megatron.training.reporting import Reporter
from megatron.training.state_digest import small_state_digest, state_digest
from megatron.training.step import ForwardStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """What a script gives: its model, its data, and its loss."""

    model: ModelProvider
    datasets: DatasetsProvider
    forward_step: ForwardStep


def pretrain(
    argv: Sequence[str],
    *,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
) -> int:
    """Trains as `argv` says, on this rank. Exit code: 0, or 2 when the settings cannot work (one line on stderr).

    Other errors are raised; the launcher names the rank that raised first.
    """
    environment = None
    providers = Providers(model=model_provider, datasets=datasets_provider, forward_step=forward_step)
    try:
        environment = read_environment()
        joins = environment.join_generation is not None
        plan, lines = plan_run(argv, world_size=environment.world_size, on_cuda=device.on_cuda(), joins=joins)
        environment = read_environment(plan.settings.parallel.local_rank)
        if environment.world_size > 1 and not environment.master_port:
            raise SettingsError("WORLD_SIZE is set and MASTER_PORT is not; start by trainmover run")
    except SettingsError as error:
        return _refuse(error, environment)
    try:
        if joins:
            _succeed(argv, environment, providers)
        else:
            _train(plan, lines, environment, providers)
    except SettingsError as error:  # found only when joined, such as a checkpoint that changed under way
        return _refuse(error, environment)
    leave_job()
    return 0


def _train(plan: Plan, lines: Sequence[str], environment: Environment, providers: Providers) -> None:
    watch = EndingWatch(plan.settings.run)
    with watch.watching():
        join_job(plan, environment)
        reporter = Reporter(plan, speaks=environment.global_rank == environment.world_size - 1)
        for line in (_headline(plan), *(f"warning: {line}" for line in lines)):
            reporter.say(line)
        trainee = build_trainee(plan, providers.model)
        checkpointer = Checkpointer(plan)
        progress, loaded = checkpointer.load(trainee)
        train, valid, test = providers.datasets(plan, dataset_sizes(plan))
        check_enough_samples(plan, train)
        for line in loaded:
            reporter.say(line)
        reporter.start()
        datasets = Datasets(train=train, valid=valid, test=test)
        loop = TrainingLoop(plan, trainee, datasets, providers.forward_step, checkpointer, reporter)
        if not environment.agent:
            _run(plan, loop, progress, FixedMembership(watch), trainee, reporter)
            return
        from megatron.training import switching

        switching.check_switchable(plan)
        parts = (watch, trainee, progress, reporter, checkpointer)
        with _until_replaced(), switching.member(plan, environment, *parts) as membership:
            _run(plan, loop, progress, membership, trainee, reporter)


def _succeed(argv: Sequence[str], environment: Environment, providers: Providers) -> None:
    """The rank takes the place of a running one, and trains on from there."""
    from megatron.training import switching
    from megatron.training.joining import ReadyInventory, build_joiner

    joiner = build_joiner(argv, environment, model_provider=providers.model, datasets_provider=providers.datasets)
    with joiner.watch.watching():
        joiner.reporter.start()
        loop = TrainingLoop(
            *(joiner.plan, joiner.trainee, joiner.datasets),
            *(providers.forward_step, joiner.checkpointer, joiner.reporter),
        )
        inventory = ReadyInventory(inventory=joiner.inventory, prepare=lambda: loop.prepare(joiner.progress))
        own = (joiner.watch, inventory, joiner.handover)
        with _until_replaced(), switching.successor(joiner.plan, environment, *own) as membership:
            _run(joiner.plan, loop, joiner.progress, membership, joiner.trainee, joiner.reporter)


def _run(
    plan: Plan,
    loop: TrainingLoop,
    progress: Progress,
    membership: Membership,
    trainee: Trainee,
    reporter: Reporter,
) -> None:
    try:
        ending = loop.run(progress, membership)
        loop.finish(progress, ending)
        if plan.settings.logging.log_state_digest:
            note_iteration(plan, 0)
            gather_parameters(plan, trainee)
            _report_digests(trainee, progress, reporter)
        words = "nothing was trained (--skip-train)" if plan.settings.run.skip_train else ending.words
        reporter.say(f"finished at iteration {progress.iteration}: {words}")
    finally:
        reporter.stop()  # also when another machine goes on: what was not written yet is


@contextmanager
def _until_replaced() -> Iterator[None]:
    """Another machine has taken this rank's place: that ends it well."""
    from megatron.resilience.worker.errors import SlotMoved

    try:
        yield
    except SlotMoved as moved:
        print(f"this rank's part is over: {moved}", flush=True)


def _report_digests(trainee: Trainee, progress: Progress, reporter: Reporter) -> None:
    digests: list[Any] = [None] * torch.distributed.get_world_size()
    own = (state_digest(trainee), small_state_digest(trainee, progress))
    torch.distributed.all_gather_object(digests, own)
    reporter.digests(progress.iteration, [whole for whole, _ in digests], [small for _, small in digests])


def _headline(plan: Plan) -> str:
    parallel = plan.settings.parallel
    pipeline = f"pipeline {parallel.pipeline_model_parallel_size}"
    if plan.virtual_pipeline_size:
        pipeline += f" (x {plan.virtual_pipeline_size} virtual stages)"
    return (
        f"training on {plan.world_size} {'CUDA devices' if plan.on_cuda else 'CPU processes'}: tensor "
        f"{parallel.tensor_model_parallel_size} x {pipeline} x data {plan.data_parallel_size}, {plan.precision}, "
        f"{plan.train_iters} iterations of {plan.global_batch_size} samples"
    )


def _refuse(error: SettingsError, environment: Environment | None) -> int:
    """Every rank says it: what is wrong may be so on one machine only."""
    where = f" (on global rank {environment.global_rank})" if environment and environment.global_rank else ""
    print(usage_line(error) + where, file=sys.stderr, flush=True)
    return EXIT_USAGE
