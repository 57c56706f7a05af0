"""Arenas hold all that is trained, keep every bit of training, and notice what leaves them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.resilience.state.arenas import ALIGNMENT_BYTES, Arena, _make_state, _packed, keep_in_arenas
from megatron.resilience.state.errors import StateError

LoneRank = Callable[[str], AbstractContextManager[Any]]
KINDS = {
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--fp16 --initial-loss-scale 64",
    "distributed": "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 500",
    "distributed-bf16": "--use-distributed-optimizer --bf16 --overlap-grad-reduce --overlap-param-gather",
    "experts": "--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 1e-2",
    "sgd": "--optimizer sgd --sgd-momentum 0.9",
    "rope": "--position-embedding-type rope --swiglu --normalization RMSNorm",
}


def arrange(rank: Any) -> tuple[Arena, ...]:
    with torch.no_grad():
        return keep_in_arenas(rank.trainee)


def outcome(rank: Any) -> list[Any]:
    """Results of three steps, and every bit of what was trained."""
    from megatron.training.state_digest import state_digest

    steps = [rank.step(iteration) for iteration in (1, 2, 3)]
    return [*((step.losses, step.grad_norm) for step in steps), state_digest(rank.trainee)]


@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_training_gives_the_same_bits_with_arenas(lone_rank: LoneRank, flags: str) -> None:
    with lone_rank(flags) as rank:
        expected = outcome(rank)
    with lone_rank(flags) as rank:
        arenas = arrange(rank)
        assert outcome(rank) == expected
        assert [arena.strays() for arena in arenas] == [0] * len(arenas)
        assert all(arena.memory.is_contiguous() and arena.memory.dim() == 1 for arena in arenas)


@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_they_hold_every_parameter_and_moment_and_nothing_twice(lone_rank: LoneRank, flags: str) -> None:
    from megatron.training.state_digest import owned_tensors

    with lone_rank(flags) as rank:
        arenas = arrange(rank)
        held = {arena.memory.untyped_storage().data_ptr() for arena in arenas}
        assert len(held) == len(arenas)
        assert len({arena.name for arena in arenas}) == len(arenas)
        outside = [
            name
            for name, tensor in owned_tensors(rank.trainee)
            if tensor.dim() and tensor.untyped_storage().data_ptr() not in held
        ]
        assert outside == []


def test_a_second_call_on_the_same_rank_leaves_values_alone(lone_rank: LoneRank) -> None:
    with lone_rank("--bf16") as rank:
        arrange(rank)
        rank.step(1)
        before = [arena.memory.clone() for arena in arrange(rank)]
        again = arrange(rank)
        assert all(torch.equal(left, right.memory) for left, right in zip(before, again, strict=True))


def test_members_are_aligned_as_torch_aligns_its_own(lone_rank: LoneRank) -> None:
    with lone_rank("--bf16") as rank:
        arenas = [arena for arena in arrange(rank) if "buffer" not in arena.name]
        addresses = [tensor.data_ptr() for arena in arenas for tensor, _ in arena.members]
        assert len(addresses) > 100
        assert all(address % ALIGNMENT_BYTES == 0 for address in addresses)


def test_state_that_was_replaced_is_noticed(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        arenas = arrange(rank)
        part = rank.trainee.optimizer.chained_optimizers[0].optimizer
        part.load_state_dict(part.state_dict())
        for group in part.param_groups:
            group["params"][0].data = group["params"][0].data.clone()
        assert sum(arena.strays() for arena in arenas) == len(part.param_groups)


def test_momentum_made_beforehand_takes_the_first_gradient_in_every_bit() -> None:
    gradient = torch.tensor([0.0, -0.0, 1e-45, -3.0, float("inf")])
    buffers = []
    for beforehand in (False, True):
        parameter = torch.nn.Parameter(torch.ones(5))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        if beforehand:
            _make_state(SimpleNamespace(optimizer=optimizer))
        parameter.grad = gradient.clone()
        optimizer.step()
        buffers.append(optimizer.state[parameter]["momentum_buffer"].view(torch.int32).tolist())
    assert buffers[0] == buffers[1]


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(StateError, match="not contiguous"):
        _packed("arena", [torch.zeros(4, 6).t()])
