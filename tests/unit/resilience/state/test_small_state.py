"""The small state is taken over whole or not at all; whatever is missing or strange in it is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.resilience.state.errors import StateError
from megatron.resilience.state.small_state import (
    SmallState,
    capture_small_state,
    check_small_state,
    decode_small_state,
    restore_small_state,
)
from megatron.resilience.state.small_tensors import SMALL_BYTES_MAX, pack

LoneRank = Callable[[str], AbstractContextManager[Any]]
FLAGS = "--use-distributed-optimizer --overlap-grad-reduce --fp16 --initial-loss-scale 64"


def captured(rank: Any) -> SmallState:
    return decode_small_state(capture_small_state(rank.trainee, {}))


def changed(state: SmallState, name: str) -> SmallState:
    """`state` with one thing wrong."""
    builtins: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(state))
    one = msgspec.msgpack.decode(msgspec.msgpack.encode(pack(torch.zeros(1))))
    changes: dict[str, Callable[[], Any]] = {
        "a scheduler value is missing": lambda: builtins["scheduler"].pop("num_steps"),
        "a scheduler value is a word": lambda: builtins["scheduler"].update(num_steps="many"),
        "a group is missing": lambda: builtins.update(parameter_groups=[builtins["parameter_groups"][0][:-1]]),
        "a rate is a word": lambda: builtins["parameter_groups"][0][0].update(lr="high"),
        "an optimizer is missing": lambda: builtins.update(grad_scalers=[]),
        "a scaler value is missing": lambda: builtins["grad_scalers"][0].pop("_growth_tracker"),
        "a calculator value is more": lambda: builtins["microbatches"].update(more=1),
        "a rerun value is missing": lambda: builtins["rerun"].pop("current_iteration"),
        "a rerun state is unknown": lambda: builtins.update(rerun_state="WALKING"),
        "a chunk is missing": lambda: builtins.update(chunks=[]),
        "a bucket is missing": lambda: builtins["chunks"][0]["buckets"].pop(),
        "a count is of no parameter": lambda: builtins["chunks"][0]["buckets"][0].update(golden_counts=[[999, 1]]),
        "a random state is missing": lambda: builtins["generators"]["tracker"].popitem(),
        "a random state is short": lambda: builtins["generators"].update(torch=b"short"),
        "python's state is short": lambda: builtins["generators"].update(python=[3, [1, 2], None]),
        "a tensor is missing": lambda: builtins["tensors"].pop("optimizer0.found_inf"),
        "a tensor has no place": lambda: builtins["tensors"].update({"chunk7.x": one}),
        "a tensor has another shape": lambda: builtins["tensors"]["optimizer0.found_inf"].update(
            one | {"shape": [2], "data": bytes(8)}
        ),
        "a tensor is damaged": lambda: builtins["tensors"]["optimizer0.found_inf"].update(data=b"abc"),
    }
    changes[name]()
    return decode_small_state(msgspec.msgpack.encode(builtins))


WRONGS = {
    "a scheduler value is missing": "'num_steps' is on one rank only",
    "a scheduler value is a word": "found 'many', expected a value like",
    "a group is missing": "another number of parameter groups",
    "a rate is a word": "found 'high'",
    "an optimizer is missing": "found 0 optimizers, expected 1",
    "a scaler value is missing": "'_growth_tracker' is on one rank only",
    "a calculator value is more": "'more' is on one rank only",
    "a rerun value is missing": "'current_iteration' is on one rank only",
    "a rerun state is unknown": "found rerun state 'WALKING'",
    "a chunk is missing": "found 0 model chunks, expected 1",
    "a bucket is missing": "bucket groups, expected",
    "a count is of no parameter": "found counts of",
    "a random state is missing": "found random states",
    "a random state is short": "random state of another size",
    "python's state is short": "same Python and numpy",
    "a tensor is missing": "'optimizer0.found_inf' is on this rank only",
    "a tensor has no place": "'chunk7.x', which has no place here",
    "a tensor has another shape": r"found shape \(2,\), expected \(1,\)",
    "a tensor is damaged": "that is no tensor",
}


def test_each_wrong_thing_is_named_and_nothing_is_changed(lone_rank: LoneRank) -> None:
    with lone_rank(FLAGS) as rank:
        rank.step(1)
        before = capture_small_state(rank.trainee, {})
        state = decode_small_state(before)
        check_small_state(state, rank.trainee)
        for name, words in WRONGS.items():
            with pytest.raises(StateError, match=words):
                check_small_state(changed(state, name), rank.trainee)
        assert capture_small_state(rank.trainee, {}) == before


def spoil(rank: Any, part: str) -> None:
    """Brings one part of the small state out of step."""
    trainee = rank.trainee
    optimizer = trainee.optimizer.chained_optimizers[0]
    bucket = trainee.model[0].bucket_groups[0]
    if part == "scheduler":
        trainee.scheduler.num_steps += 5
    elif part == "rate":
        optimizer.optimizer.param_groups[0]["lr"] = 0.5
    elif part == "extra value of a group":
        optimizer.optimizer.param_groups[0]["left"] = 1
    elif part == "scaler":
        optimizer.grad_scaler._growth_tracker += 1
    elif part == "scale":
        optimizer.grad_scaler._scale = torch.tensor([7.0])
    elif part == "step":
        next(iter(optimizer.optimizer.state.values()))["step"] += 1
    elif part == "first batch":
        bucket.is_first_batch = True
        bucket.golden_per_param_grad_ready_counts = {}
    elif part == "gather":
        bucket.param_gather_dispatched = not bucket.param_gather_dispatched
    elif part == "torch":
        torch.rand(1)
    elif part == "tracker":
        from megatron.core import tensor_parallel

        with tensor_parallel.get_cuda_rng_tracker().fork():
            torch.rand(1)
    elif part == "evaluation":
        trainee.model[0].eval()
    else:
        import random

        import numpy as np

        {"python": random.random, "numpy": np.random.rand}[part]()


PARTS = (
    *("scheduler", "rate", "extra value of a group", "scaler", "scale", "step", "first batch", "gather", "torch"),
    *("tracker", "evaluation", "python", "numpy"),
)


def test_each_part_is_captured_and_restored(lone_rank: LoneRank) -> None:
    with lone_rank(FLAGS) as rank:
        for iteration in (1, 2):  # the second one ends the first batch
            rank.step(iteration)
        before = capture_small_state(rank.trainee, {})
        for part in PARTS:
            spoil(rank, part)
            assert capture_small_state(rank.trainee, {}) != before, part
            restore_small_state(decode_small_state(before), rank.trainee)
            assert capture_small_state(rank.trainee, {}) == before, part


def test_a_restored_tracker_owns_its_states(lone_rank: LoneRank) -> None:
    from megatron.core import tensor_parallel

    with lone_rank(FLAGS) as rank:
        state = captured(rank)
        restore_small_state(state, rank.trainee)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            torch.rand(100)
        assert captured(rank).generators.tracker != state.generators.tracker
        restore_small_state(state, rank.trainee)
        assert captured(rank).generators.tracker == state.generators.tracker


def test_a_buffer_whose_type_changed_at_its_first_use_is_taken_over_with_it(lone_rank: LoneRank) -> None:
    with lone_rank("--bf16") as rank:
        module = rank.trainee.model[0].module
        module.register_buffer("bias", torch.full((3,), 1 / 3))
        payload = capture_small_state(rank.trainee, {})
        module.bias.data = module.bias.data.to(torch.bfloat16)
        restore_small_state(decode_small_state(payload), rank.trainee)
        assert module.bias.dtype == torch.float32
        assert torch.equal(module.bias, torch.full((3,), 1 / 3))


def test_a_tensor_that_only_the_owner_has_made_yet_is_made(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        module = rank.trainee.model[0].module
        module.cached = torch.ones(2)
        payload = capture_small_state(rank.trainee, {})
        del module.cached
        restore_small_state(decode_small_state(payload), rank.trainee)
        assert torch.equal(module.cached, torch.ones(2))


def test_a_value_that_cannot_travel_is_named_not_dropped(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        rank.trainee.optimizer.chained_optimizers[0].optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        with pytest.raises(StateError, match="'lr' is tensor"):
            capture_small_state(rank.trainee, {})


def test_a_state_that_is_not_small_is_refused_by_name(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        rank.trainee.model[0].module.register_buffer("table", torch.zeros(SMALL_BYTES_MAX // 4 + 1))
        with pytest.raises(StateError, match=r"its largest tensor is chunk0\.module\.table"):
            capture_small_state(rank.trainee, {})


@given(noise=st.binary(max_size=200))
def test_noise_is_no_small_state(noise: bytes) -> None:
    with pytest.raises(StateError, match="no small state"):
        decode_small_state(noise)
