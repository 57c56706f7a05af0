"""A digest sees every bit that a rank owns."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from megatron.resilience.state.inventory import take_inventory
from megatron.training.checkpointing import Progress
from megatron.training.state_digest import owned_tensors, small_state_digest, state_digest


class NoBookkeeping:
    def capture(self) -> dict[str, Any]:
        return {}

    def restore(self, values: dict[str, Any]) -> None: ...


LoneRank = Callable[[str], AbstractContextManager[Any]]


def test_the_digest_changes_with_any_owned_tensor(lone_rank: LoneRank) -> None:
    with lone_rank("--use-distributed-optimizer") as rank:
        rank.step(1)
        before = state_digest(rank.trainee)
        assert state_digest(rank.trainee) == before
        for name, tensor in list(owned_tensors(rank.trainee)):
            bits = tensor.detach().reshape(-1)[:1].view(torch.uint8)
            bits[0] ^= 1
            assert state_digest(rank.trainee) != before, name
            bits[0] ^= 1
        assert state_digest(rank.trainee) == before


def test_parameters_and_both_moments_and_the_step_are_owned(lone_rank: LoneRank) -> None:
    with lone_rank("--bf16") as rank:
        rank.step(1)
        names = [name for name, _ in owned_tensors(rank.trainee)]
        assert len(names) == len(set(names))
        for kind in ("main", "exp_avg", "exp_avg_sq", "step"):
            assert any(name.startswith("optimizer") and name.endswith(f".{kind}") for name in names), kind
        assert any(name.startswith("chunk0.") and "word_embeddings" in name for name in names)


def test_the_small_digest_changes_with_all_that_is_no_owned_tensor(lone_rank: LoneRank) -> None:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    flags = "--use-distributed-optimizer --fp16 --initial-loss-scale 128"
    with lone_rank(flags) as rank:
        rank.step(1)
        trainee, progress = rank.trainee, Progress(iteration=1)
        (part,) = [getattr(trainee.optimizer, "chained_optimizers", [trainee.optimizer])[0]]
        group, flags_of = part.optimizer.param_groups[0], trainee.model[0].bucket_groups[0]
        machine = get_rerun_state_machine()
        seen = {small_state_digest(trainee, progress)}
        assert seen == {small_state_digest(trainee, progress)} != {""}
        for change in (
            lambda: torch.rand(1),
            random.random,
            np.random.rand,
            lambda: setattr(trainee.scheduler, "num_steps", trainee.scheduler.num_steps + 1),
            lambda: group.update(lr=group["lr"] / 2),
            lambda: group.update(weight_decay=0.5),
            lambda: part.grad_scaler._scale.mul_(2),
            lambda: setattr(part.grad_scaler, "_growth_tracker", part.grad_scaler._growth_tracker + 1),
            lambda: setattr(flags_of, "is_first_batch", not flags_of.is_first_batch),
            lambda: setattr(machine, "first_iteration_complete", not machine.first_iteration_complete),
            lambda: next(iter(trainee.modules())).register_buffer("counted", torch.ones(1), persistent=False),
            lambda: setattr(progress, "consumed_train_samples", 7),
        ):
            change()
            now = small_state_digest(trainee, progress)
            assert now not in seen, f"change {len(seen)} is not seen"
            seen.add(now)


def test_the_order_of_names_is_no_difference(lone_rank: LoneRank) -> None:
    with lone_rank("--use-distributed-optimizer") as rank:
        rank.step(1)
        before = small_state_digest(rank.trainee, Progress())
        group = rank.trainee.optimizer.chained_optimizers[0].optimizer.param_groups[0]
        group["lr"] = group.pop("lr")
        assert small_state_digest(rank.trainee, Progress()) == before


def test_a_state_that_cannot_be_captured_has_no_digest(lone_rank: LoneRank) -> None:
    with lone_rank("--use-distributed-optimizer") as rank:
        rank.step(1)
        rank.trainee.optimizer.chained_optimizers[0].optimizer.param_groups[0]["strange"] = object()
        assert small_state_digest(rank.trainee, Progress()) == ""


@pytest.mark.parametrize(
    "flags",
    [
        "--use-distributed-optimizer",
        "--bf16",
        "--use-distributed-optimizer --fp16 --initial-loss-scale 128 --loss-scale-window 2",
        "--optimizer sgd",
        "--use-distributed-optimizer --num-experts 4 --moe-aux-loss-coeff 1e-2 --disable-bias-linear",
    ],
)
def test_a_run_whose_machines_can_be_replaced_has_the_digests_of_one_whose_cannot(
    lone_rank: LoneRank, flags: str
) -> None:
    found = []
    for is_replaceable in (False, True):
        with lone_rank(flags) as rank:
            if is_replaceable:
                inventory = take_inventory(rank.trainee, NoBookkeeping())
            for iteration in (1, 2, 3):
                rank.step(iteration)
            if is_replaceable:
                inventory.verify()
            found.append((state_digest(rank.trainee), small_state_digest(rank.trainee, Progress(iteration=3))))
    assert found[0] == found[1]
    assert all(found[0])
