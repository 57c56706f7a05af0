"""SHA-256 of what a rank owns. The proof of bit-equality rests on it.

Two digests, as runs compare differently: parameters, buffers and optimizer tensors are equal in a run that was resumed;
the rest, such as random states and first-batch flags, only in runs that took the same steps in their processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from megatron.training.checkpointing import Progress
from megatron.training.model_setup import Trainee


def state_digest(trainee: Trainee) -> str:
    """Hex SHA-256 over names and bytes of every parameter and optimizer tensor of this rank, in a fixed order."""
    digest = hashlib.sha256()
    for name, tensor in owned_tensors(trainee):
        digest.update(name.encode())
        flat = tensor.detach().contiguous().reshape(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def small_state_digest(trainee: Trainee, progress: Progress) -> str:
    """Hex SHA-256 over all else that decides how this rank goes on: random states, loss scaler, scheduler, rates of
    parameter groups, buffers that are not saved, flags of data parallelism, counters. Clocks are not in it.

    Empty for a state that cannot be captured, of which nobody can say that it is equal.
    """
    # A run without resilience, and without digests, has none of it.
    from megatron.resilience.state.errors import StateError
    from megatron.resilience.state.small_state import capture_small_state

    try:
        state = msgspec.msgpack.decode(capture_small_state(trainee, dataclasses.asdict(progress)))
    except StateError:
        return ""
    return hashlib.sha256(msgspec.msgpack.encode(state, order="deterministic")).hexdigest()


def owned_tensors(trainee: Trainee) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter, buffer and optimizer tensor on this rank."""
    for index, module in enumerate(trainee.modules()):
        for name, tensor in module.state_dict(keep_vars=True).items():
            if torch.is_tensor(tensor):
                yield f"chunk{index}.{name}", tensor
    for index, part in enumerate(_parts(trainee.optimizer)):
        for group_index, group in enumerate(part.param_groups):
            for order, parameter in enumerate(group["params"]):
                yield f"optimizer{index}.{group_index}.{order}.main", parameter
                for name, value in sorted(part.state.get(parameter, {}).items()):
                    if torch.is_tensor(value):
                        yield f"optimizer{index}.{group_index}.{order}.{name}", value


def _parts(optimizer: Any) -> Iterator[Any]:
    """The torch optimizers inside megatron-core's wrappers; stubs of ranks without such parameters have none."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield part.optimizer
