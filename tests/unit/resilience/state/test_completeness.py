"""What an inventory leaves out is found, wherever it hides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from megatron.resilience.state.completeness import reachable_tensors, unlisted_tensors
from megatron.resilience.state.inventory import take_inventory
from tests.unit.resilience.state.test_arenas import KINDS
from tests.unit.resilience.state.test_inventory import Counters

LoneRank = Callable[[str], AbstractContextManager[Any]]


@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_nothing_is_left_out_before_or_after_a_step(lone_rank: LoneRank, flags: str) -> None:
    with lone_rank(flags) as rank:
        inventory = take_inventory(rank.trainee, Counters())
        assert unlisted_tensors(rank.trainee, inventory) == []
        rank.step(1)
        assert unlisted_tensors(rank.trainee, inventory) == []
        assert sum(1 for _ in reachable_tensors(rank.trainee)) > 80


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self) -> None: ...


def added(place: str, trainee: Any) -> None:
    """Hides a tensor of three elements from the inventory."""
    hidden, chunk = torch.ones(3), trainee.model[0]
    part = trainee.optimizer.chained_optimizers[0]
    if place == "optimizer state":
        part.optimizer.state[part.optimizer.param_groups[0]["params"][0]]["max_exp_avg_sq"] = hidden
    elif place == "optimizer list":
        part.history = [{"of": (1, hidden)}]
    elif place == "scheduler":
        trainee.scheduler.averages = {"lr": hidden}
    elif place == "list in a module":
        chunk.module.extra = [hidden]
    elif place == "tensor of a tensor":
        next(iter(chunk.parameters())).running = hidden
    elif place == "closure":
        trainee.config.hook = lambda: hidden.sum()
    elif place == "partial":
        trainee.config.hook = functools.partial(print, hidden)
    else:
        trainee.config.hook = Slotted(hidden).method


@pytest.mark.parametrize(
    "place",
    [
        *("optimizer state", "optimizer list", "scheduler", "list in a module"),
        *("tensor of a tensor", "closure", "partial", "slots behind a method"),
    ],
)
def test_a_tensor_that_was_added_is_reported_with_its_path(lone_rank: LoneRank, place: str) -> None:
    with lone_rank("--use-distributed-optimizer") as rank:
        inventory = take_inventory(rank.trainee, Counters())
        added(place, rank.trainee)
        (found,) = unlisted_tensors(rank.trainee, inventory)
        assert found.startswith("trainee.")
        assert found.endswith("torch.float32 (3,)")


def test_a_buffer_that_was_added_is_sent_by_itself(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        inventory = take_inventory(rank.trainee, Counters())
        rank.trainee.model[0].module.register_buffer("seen", torch.ones(3), persistent=False)
        assert unlisted_tensors(rank.trainee, inventory) == []
        payload = inventory.capture()
        rank.trainee.model[0].module.seen.zero_()
        inventory.restore(payload)
        assert torch.equal(rank.trainee.model[0].module.seen, torch.ones(3))
