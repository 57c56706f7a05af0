"""A whole job of one rank inside the test process, for what needs a real model and optimizer but no peers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

TINY = (
    "--num-layers 2 --hidden-size 24 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 3e-3 --min-lr 3e-4 --mock-data --vocab-size 60 "
    "--tokenizer-type NullTokenizer --num-workers 0 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
    "--make-vocab-size-divisible-by 1"
)


@dataclass(frozen=True, kw_only=True)
class LoneRank:
    """One rank that is a whole job: its plan, what it trains, a step of it, and its data."""

    plan: Any
    trainee: Any
    step: Callable[[int], Any]
    sources: list[Any]


@contextlib.contextmanager
def lone_rank(flags: str = "") -> Iterator[LoneRank]:
    """A job of one rank with the tiny model and `flags`; left again at the end."""
    from megatron.training import preload  # noqa: F401  (device and patches first)
    from megatron.training.data import BatchSource, build_gpt_datasets, build_loader, dataset_sizes
    from megatron.training.environment import read_environment
    from megatron.training.initialize import join_job, leave_job
    from megatron.training.model_setup import build_trainee
    from megatron.training.preflight import plan_run
    from megatron.training.step import train_step
    from pretrain_gpt import forward_step, model_provider

    plan, _ = plan_run([*TINY.split(), *flags.split()], world_size=1, on_cuda=False)
    try:
        join_job(plan, read_environment(source={}))
        trainee = build_trainee(plan, model_provider)
        train, _, _ = build_gpt_datasets(plan, dataset_sizes(plan))
        sources = [BatchSource(plan, build_loader(plan, train, consumed_samples=0)) for _ in trainee.model]
        yield LoneRank(
            plan=plan,
            trainee=trainee,
            sources=sources,
            step=lambda iteration: train_step(
                *(plan, trainee, sources, forward_step, iteration), before_update=lambda: None
            ),
        )
    finally:
        leave_job()


@pytest.fixture(name="lone_rank")
def lone_rank_fixture() -> Callable[[str], contextlib.AbstractContextManager[LoneRank]]:
    return lone_rank
