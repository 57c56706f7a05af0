"""SHA-256 of what a rank owns: parameters, buffers, optimizer state. The proof of bit-equality rests on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron.training.model_setup import Trainee


def state_digest(trainee: Trainee) -> str:
    """Hex SHA-256 over names and bytes of every parameter and optimizer tensor of this rank, in a fixed order."""
    digest = hashlib.sha256()
    for name, tensor in owned_tensors(trainee):
        digest.update(name.encode())
        flat = tensor.detach().contiguous().reshape(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
