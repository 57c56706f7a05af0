"""The distributed optimizer's state is saved from the right place and loaded whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from megatron.resilience.patches import registry

LoneRank = Callable[[str], AbstractContextManager[Any]]
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
# Small buckets of sizes that 128 does not divide, so that there is padding between them.
BUCKETS = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 500"


@contextmanager
def without(name: str) -> Iterator[None]:
    """The patch `name` taken out for a while; those behind it in the order stay."""
    registry.revert_patches([name])
    try:
        yield
    finally:
        registry.apply_patches(on_cuda=False)


def described(rank: Any, *, is_loading: bool) -> tuple[Any, Any]:
    """(sharded state of the model, sharded state of its optimizer)."""
    (module,) = rank.trainee.modules()
    model = module.sharded_state_dict(metadata=METADATA)
    return model, rank.trainee.optimizer.sharded_state_dict({"model": model}, is_loading=is_loading, metadata=METADATA)


def saved_parameters(rank: Any) -> list[bool]:
    """For each parameter, whether the fp32 copy that the optimizer would save equals it."""
    model, optimizer = described(rank, is_loading=False)
    weights = {
        place(tensor): tensor.data for tensor in model.values() if torch.is_tensor(getattr(tensor, "data", None))
    }
    saved = [state["param"] for state in optimizer["param_state"].values()]
    return [torch.equal(tensor.data, weights[place(tensor)].detach()) for tensor in saved]


def place(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Name and offset of a sharded tensor: the layers of a block share a name."""
    return tensor.key.removeprefix("optimizer.state.param."), tuple(tensor.global_offset)


def test_parameters_behind_a_padded_bucket_are_saved_from_their_place(lone_rank: LoneRank) -> None:
    with lone_rank(BUCKETS) as rank:
        rank.step(1)
        buffer = rank.trainee.model[0].buffers[0]
        assert any(bucket.numel_unpadded < bucket.grad_data.numel() for bucket in buffer.buckets[:-1]), "no padding"
        assert all(saved_parameters(rank))


def test_without_the_patch_they_are_saved_shifted(lone_rank: LoneRank) -> None:
    with lone_rank(BUCKETS) as rank, without("optimizer-save-unpadded"):
        rank.step(1)
        assert not all(saved_parameters(rank))


def test_the_index_of_parameters_is_put_back(lone_rank: LoneRank) -> None:
    with lone_rank(BUCKETS) as rank:
        rank.step(1)
        buffer = rank.trainee.model[0].buffers[0]
        before = dict(buffer.param_index_map)
        described(rank, is_loading=False)
        assert buffer.param_index_map == before


def test_a_fresh_optimizer_can_describe_what_it_is_about_to_load(lone_rank: LoneRank) -> None:
    with lone_rank("--use-distributed-optimizer") as rank:
        _, state = described(rank, is_loading=True)
        assert all("exp_avg" in tensors for tensors in state["param_state"].values())


@pytest.mark.parametrize("missing", ["optimizer-state-before-load", "optimizer-load-skips-step"])
def test_without_the_patch_loading_fails(lone_rank: LoneRank, missing: str) -> None:
    with (
        lone_rank("--use-distributed-optimizer") as rank,
        without(missing),
        pytest.raises((KeyError, AssertionError, IndexError)),
    ):
        load_own_state(rank)


def load_own_state(rank: Any) -> None:
    """Loads into the optimizer what it would save itself."""
    _, state = described(rank, is_loading=True)
    param_state = {
        index: {name: tensor.data.clone() for name, tensor in tensors.items()}
        for index, tensors in state["param_state"].items()
    }
    rank.trainee.optimizer.load_state_dict({**state, "param_state": param_state})


def steps_of(rank: Any) -> list[torch.Tensor]:
    return [state["step"] for state in rank.trainee.optimizer.optimizer.state.values()]


def test_each_parameter_counts_its_own_steps_after_a_load(lone_rank: LoneRank) -> None:
    with lone_rank("--use-distributed-optimizer") as rank:
        rank.step(1)
        load_own_state(rank)
        rank.step(2)
        assert {float(step) for step in steps_of(rank)} == {2.0}


def test_without_the_patch_one_step_counts_as_many(lone_rank: LoneRank) -> None:
    with lone_rank("--use-distributed-optimizer") as rank, without("optimizer-own-steps"):
        rank.step(1)
        load_own_state(rank)
        rank.step(2)
        assert {float(step) for step in steps_of(rank)} != {2.0}
