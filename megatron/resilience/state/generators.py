"""Random states of this process: torch, device, python, numpy, megatron-core's tracker. Called by `small_state.py`."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import torch
from megatron.core import tensor_parallel

from megatron.resilience.state.errors import StateError


class GeneratorStates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of them, as bytes and numbers. On the CPU the device's generator is torch's own."""

    torch: bytes
    device: bytes
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]
    tracker: dict[str, bytes]
    tracker_seeds: tuple[int, ...]


def capture_generators() -> GeneratorStates:
    """The states as they are now; copies."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    return GeneratorStates(
        torch=_bytes(torch.get_rng_state()),
        device=_bytes(torch.cuda.get_rng_state()),
        python=random.getstate(),
        numpy=(str(name), tuple(int(key) for key in keys), int(position), int(has_gauss), float(gauss)),
        tracker={name: _bytes(state) for name, state in tracker.get_states().items()},
        tracker_seeds=tuple(sorted(tracker.seeds_)),
    )


def check_generators(states: GeneratorStates) -> None:
    """Raises StateError when `states` are not of generators as this process has them."""
    here = capture_generators()
    if set(states.tracker) != set(here.tracker):
        raise StateError(
            f"found random states {sorted(states.tracker)}, expected {sorted(here.tracker)}; are all settings the same?"
        )
    pairs = [(states.torch, here.torch), (states.device, here.device)]
    pairs += [(state, here.tracker[name]) for name, state in states.tracker.items()]
    if any(len(found) != len(expected) for found, expected in pairs):
        raise StateError("found a random state of another size; do both ranks run the same version of torch?")
    if len(states.python[1]) != len(here.python[1]) or len(states.numpy[1]) != len(here.numpy[1]):
        raise StateError("found a random state of another size; do both ranks run the same Python and numpy?")


def restore_generators(states: GeneratorStates) -> None:
    """Puts `states`, which were checked, in force."""
    random.setstate(states.python)
    name, keys, position, has_gauss, gauss = states.numpy
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_tensor(states.torch))
    torch.cuda.set_rng_state(_tensor(states.device))
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    # Tensors of its own: the tracker keeps what it is given and writes into it.
    tracker.set_states({name: _tensor(state) for name, state in states.tracker.items()})
    tracker.seeds_ = set(states.tracker_seeds)


def _bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
