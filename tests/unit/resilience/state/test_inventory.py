"""Whoever receives a rank's inventory, trained or not, becomes that rank in every bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from megatron.resilience.state.errors import StateError
from megatron.resilience.state.inventory import Inventory, take_inventory

LoneRank = Callable[[str], AbstractContextManager[Any]]
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
KINDS = {
    "fp32": DROPOUT,
    "fp16": f"{DROPOUT} --fp16 --initial-loss-scale 65536 --loss-scale-window 2 --hysteresis 1",
    "distributed-bf16": f"{DROPOUT} --use-distributed-optimizer --bf16 --overlap-grad-reduce --overlap-param-gather",
    "experts": f"{DROPOUT} --num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 1e-2",
    "sgd": f"{DROPOUT} --optimizer sgd --sgd-momentum 0.9",
}


class Counters:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {"iteration": 0}

    def capture(self) -> dict[str, Any]:
        return dict(self.values)

    def restore(self, values: dict[str, Any]) -> None:
        if "iteration" not in values:
            raise ValueError("no iteration")
        self.values = values


def inventory_of(rank: Any) -> Inventory:
    return take_inventory(rank.trainee, Counters())


def receive(inventory: Inventory, arenas: list[bytes], small: bytes) -> None:
    for memory, found in zip(inventory.memory(), arenas, strict=True):
        memory[:] = found
    inventory.restore(small)


@pytest.mark.parametrize("trained", [0, 1])
@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_whoever_receives_an_inventory_goes_on_as_its_owner(lone_rank: LoneRank, flags: str, trained: int) -> None:
    from megatron.training.state_digest import state_digest

    with lone_rank(flags) as rank:
        own = inventory_of(rank)
        for iteration in (1, 2, 3):
            rank.step(iteration)
        arenas, small = [bytes(memory) for memory in own.memory()], own.capture()
        expected = rank.step(4), state_digest(rank.trainee), own.capture()
    with lone_rank(flags) as rank:
        torch.rand(10)  # the random states differ before
        taken = inventory_of(rank)
        assert taken.layout_digest() == own.layout_digest()
        for iteration in range(trained):
            rank.step(iteration + 1)
        for _ in range(3 - trained):  # the samples that the owner has read
            skip_batch(rank)
        receive(taken, arenas, small)
        assert taken.capture() == small
        assert (rank.step(4), state_digest(rank.trainee), taken.capture()) == expected


def skip_batch(rank: Any) -> None:
    for source in rank.sources:
        for _ in range(2):
            source.next_batch()


def test_bookkeeping_comes_along(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        own, counters = inventory_of(rank), Counters()
        own.bookkeeping.restore({"iteration": 7})
        taken = take_inventory(rank.trainee, counters)
        taken.restore(own.capture())
        assert counters.values == {"iteration": 7}


def test_bookkeeping_of_another_release_is_refused(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        own, counters = inventory_of(rank), Counters()
        counters.values = {"step": 7}
        payload = take_inventory(rank.trainee, counters).capture()
        before = own.capture()
        torch.rand(1)
        drawn = own.capture()
        with pytest.raises(StateError, match="bookkeeping: no iteration"):
            own.restore(payload)
        assert own.capture() == drawn != before


def test_layouts_of_other_models_differ(lone_rank: LoneRank) -> None:
    digests = []
    kinds = ["", "--bf16", "--num-layers 1", "--use-distributed-optimizer", "--disable-bias-linear"]
    kinds += ["--fp16", "--fp16 --loss-scale 64"]  # these two differ in their small state alone
    for flags in kinds:
        with lone_rank(flags) as rank:
            digests.append(inventory_of(rank).layout_digest())
    assert len(set(digests)) == len(kinds)


def test_an_outstanding_reduction_is_no_boundary(lone_rank: LoneRank) -> None:
    with lone_rank("--use-distributed-optimizer --overlap-grad-reduce") as rank:
        own = inventory_of(rank)
        rank.step(1)
        rank.trainee.model[0].bucket_groups[0].grad_reduce_handle = object()
        with pytest.raises(StateError, match="grad_reduce_handle is outstanding"):
            own.capture()


def test_state_that_left_its_arena_is_not_sent(lone_rank: LoneRank) -> None:
    with lone_rank("--bf16") as rank:
        own = inventory_of(rank)
        parameter = next(iter(rank.trainee.model[0].parameters()))
        parameter.data = parameter.data.clone()
        with pytest.raises(StateError, match=r"1 of \d+ tensors lie elsewhere"):
            own.memory()


def test_the_memory_is_that_of_training_itself(lone_rank: LoneRank) -> None:
    with lone_rank("--bf16") as rank:
        own = inventory_of(rank)
        assert sum(len(memory) for memory in own.memory()) == own.total_bytes
        for memory in own.memory():
            memory[:] = bytes(len(memory))
        assert not any(parameter.any() for parameter in rank.trainee.model[0].parameters())
