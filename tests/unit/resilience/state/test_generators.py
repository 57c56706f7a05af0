"""Random states of every kind go on from where they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megatron.resilience.state.errors import StateError
from megatron.resilience.state.generators import capture_generators, check_generators, restore_generators
from megatron.training import preload  # noqa: F401  (device and patches first)


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.randn(3), float(torch.rand(1)), float(torch.randn(1))]


def test_every_generator_goes_on_from_where_it_was() -> None:
    draws()  # leaves a second normal number waiting in python's and numpy's
    states = capture_generators()
    first = draws()
    assert draws() != first
    check_generators(states)
    restore_generators(states)
    assert capture_generators() == states
    assert draws() == first


def test_a_tracker_of_other_names_is_refused() -> None:
    states = capture_generators()
    import msgspec

    with pytest.raises(StateError, match="found random states"):
        check_generators(msgspec.structs.replace(states, tracker={"another": b""}))
