"""Tensors outside arenas are found at the moment, travel exactly, and bytes that are no tensor are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.resilience.state.completeness import unlisted_tensors
from megatron.resilience.state.errors import StateError
from megatron.resilience.state.inventory import take_inventory
from megatron.resilience.state.small_tensors import (
    SMALL_BYTES_MAX,
    PackedTensor,
    module_of,
    pack,
    scratch_tensors,
    small_tensors,
    unpack,
)
from tests.unit.resilience.state.test_inventory import Counters

LoneRank = Callable[[str], AbstractContextManager[Any]]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
]


@given(dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 4), max_size=3))
def test_a_tensor_survives_the_way_in_every_bit(dtype: torch.dtype, shape: list[int]) -> None:
    tensor = (torch.arange(64).float() - 9.5)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    found = unpack(pack(tensor))
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_negative_zero_and_not_a_number_survive() -> None:
    tensor = torch.tensor([-0.0, float("nan"), float("inf")])
    assert unpack(pack(tensor)).view(torch.int32).tolist() == tensor.view(torch.int32).tolist()


def test_a_view_is_packed_without_what_it_is_a_view_of() -> None:
    assert len(pack(torch.zeros(1000)[3:5]).data) == 8


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("float32", (3,), 11),
        ("float31", (3,), 12),
        ("float32", (-3,), 12),
        ("float32", (2**40, 0), 0),
        ("float32", (2**20, 2**20, 2**20), 12),
        ("float32", (-1, -3), 12),
    ],
)
def test_bytes_that_are_no_tensor_are_refused(dtype: str, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(StateError, match="that is no tensor"):
        unpack(PackedTensor(dtype=dtype, shape=shape, data=bytes(size)))


def test_a_type_that_cannot_travel_is_refused() -> None:
    with pytest.raises(StateError, match="type complex64"):
        pack(torch.zeros(1, dtype=torch.complex64))


def test_steps_scales_and_flags_are_found_and_named_once(lone_rank: LoneRank) -> None:
    with lone_rank("--fp16 --initial-loss-scale 64") as rank:
        rank.step(1)
        names = [small.name for small in small_tensors(rank.trainee)]
        assert len(names) == len(set(names))
        for part in ("optimizer0.found_inf", "optimizer0.grad_scaler._scale", "optimizer0.0.0.step"):
            assert part in names


def test_what_was_replaced_is_found_where_it_is_now(lone_rank: LoneRank) -> None:
    with lone_rank("--fp16 --initial-loss-scale 64") as rank:
        scaler = rank.trainee.optimizer.chained_optimizers[0].grad_scaler
        scaler._scale = torch.tensor([3.0])
        found = {small.name: small for small in small_tensors(rank.trainee)}["optimizer0.grad_scaler._scale"]
        assert found.tensor is scaler._scale
        found.replace(torch.tensor([4.0]))
        assert scaler._scale.item() == 4.0


def test_the_last_input_of_a_stage_is_no_state(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        inventory = take_inventory(rank.trainee, Counters())
        decoder = rank.trainee.model[0].module.decoder
        decoder.set_input_tensor(torch.empty(SMALL_BYTES_MAX + 1, dtype=torch.uint8))
        assert len(inventory.capture()) < 100_000
        assert unlisted_tensors(rank.trainee, inventory) == []
        decoder.register_buffer("kept", torch.ones(3))
        assert "chunk0.module.decoder.kept" in [small.name for small in small_tensors(rank.trainee)]


def test_what_experts_routed_is_scratch_wherever_their_dispatcher_keeps_it(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        layer, kept = rank.trainee.model[0].module.decoder.layers[0], [torch.ones(2), torch.ones(3)]
        before = [tensor.data_ptr() for tensor in scratch_tensors(rank.trainee)]
        layer.token_dispatcher = SimpleNamespace(map=kept[0], manager=SimpleNamespace(counts=[{"a": kept[1]}]))
        layer.weights = torch.ones(4)
        found = [tensor.data_ptr() for tensor in scratch_tensors(rank.trainee)]
        assert sorted(found) == sorted([*before, *(tensor.data_ptr() for tensor in kept)])


@pytest.mark.parametrize("name", ["chunk1.module", "chunk0.nowhere.at", "optimizer0.step", "", "chunk0.module.a-b"])
def test_a_name_without_a_place_is_refused(lone_rank: LoneRank, name: str) -> None:
    with lone_rank("") as rank:
        assert module_of(rank.trainee, "chunk0.module.decoder.mask")[1] == "mask"
        with pytest.raises(StateError, match="has no place here"):
            module_of(rank.trainee, name)
