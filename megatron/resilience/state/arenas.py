"""Brings what a rank trains into few contiguous pieces of memory, so that it can be sent and received where it lies.

Called by `inventory.py` once, when model and optimizer are built (and loaded, where a checkpoint is). megatron-core
holds parameters in one buffer only with its distributed optimizer, and main parameters and moments always in one
small tensor a parameter; moments appear at the first step only. Here they are made beforehand, and each kind is
re-pointed into one arena. Values and alignment stay, so training gives the same bits as without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron.resilience.patches.distrib_optimizer import make_optimizer_state
from megatron.resilience.state.errors import StateError

ALIGNMENT_BYTES = 64
"""As torch aligns each tensor of its own: kernels that look at alignment take the same path as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """`memory` is one-dimensional and contiguous; `members` are the tensors that lie in it, as (tensor, offset)."""

    name: str
    memory: torch.Tensor
    members: tuple[tuple[torch.Tensor, int], ...] = ()

    def strays(self) -> int:
        """Number of members that do not lie in their place any more."""
        base, size = self.memory.data_ptr(), self.memory.element_size()
        return sum(tensor.numel() > 0 and tensor.data_ptr() != base + offset * size for tensor, offset in self.members)


def keep_in_arenas(trainee: Any) -> tuple[Arena, ...]:
    """The arenas of all that `trainee` trains, in an order that is the same on every rank of this layout.

    Allocates one kind of tensor at a time; what it replaces is freed at once.
    """
    arenas = [*_parameter_buffers(trainee), *_loose_parameters(trainee)]
    held = {arena.memory.untyped_storage().data_ptr() for arena in arenas}
    for index, part in enumerate(optimizer_parts(trainee.optimizer)):
        _make_state(part)
        for kind, tensors in _kinds(part, held).items():
            arenas += _pack(f"optimizer{index}.{kind}", tensors)
    return tuple(arenas)


def optimizer_parts(optimizer: Any) -> Iterator[Any]:
    """megatron-core's optimizers that hold parameters: one for dense and one for expert parameters, at most."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield part


def parameter_buffers(chunk: Any) -> list[Any]:
    """megatron-core's buffers of one wrapped chunk: by data type, and apart for experts with a group of their own."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _parameter_buffers(trainee: Any) -> Iterator[Arena]:
    for index, chunk in enumerate(trainee.model):
        for number, buffer in enumerate(parameter_buffers(chunk)):
            if buffer.param_data is not None:
                places = ((parameter, buffer.param_index_map[parameter][0]) for parameter in buffer.params)
                yield Arena(name=f"chunk{index}.buffer{number}", memory=buffer.param_data, members=tuple(places))


def _loose_parameters(trainee: Any) -> Iterator[Arena]:
    """Parameters outside such buffers: all of them without the distributed optimizer, frozen ones always."""
    for index, chunk in enumerate(trainee.model):
        buffers = [buffer.param_data for buffer in parameter_buffers(chunk) if buffer.param_data is not None]
        held = {memory.untyped_storage().data_ptr() for memory in buffers}
        loose = [p for p in chunk.parameters() if p.untyped_storage().data_ptr() not in held]
        yield from _pack(f"chunk{index}.parameters", loose)


def _make_state(part: Any) -> None:
    """Gives the inner optimizer the state that its first step would make, with the values it would have before it."""
    inner = part.optimizer
    if isinstance(inner, torch.optim.Adam):
        make_optimizer_state(inner)
    elif isinstance(inner, torch.optim.SGD):
        for group in inner.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                if inner.state[parameter].get("momentum_buffer") is None:
                    # The first step takes the gradient as it is. Adding it to -0.0 gives each of its bits, to 0.0 not.
                    inner.state[parameter]["momentum_buffer"] = torch.full_like(parameter.data, -0.0)
    else:
        part.init_state_fn(inner, part.config)


def _kinds(part: Any, held: set[int]) -> dict[str, list[torch.Tensor]]:
    """Tensors of `part` by kind: main parameters that have memory of their own, and each entry of the state."""
    kinds: dict[str, list[torch.Tensor]] = {}
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.untyped_storage().data_ptr() not in held:
                kinds.setdefault("main", []).append(parameter)
            for name, value in sorted(part.optimizer.state.get(parameter, {}).items()):
                if torch.is_tensor(value) and value.dim() > 0:
                    kinds.setdefault(name, []).append(value)
    return kinds


def _pack(name: str, tensors: Iterable[torch.Tensor]) -> Iterator[Arena]:
    """Moves `tensors` into an arena a data type; a tensor that comes twice lies there once."""
    by_dtype: dict[torch.dtype, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, {})[id(tensor)] = tensor
    for dtype, found in sorted(by_dtype.items(), key=lambda item: str(item[0])):
        yield _packed(f"{name}.{str(dtype).removeprefix('torch.')}", list(found.values()))


def _packed(name: str, tensors: list[torch.Tensor]) -> Arena:
    step = max(1, ALIGNMENT_BYTES // tensors[0].element_size())
    offsets, total = [], 0
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise StateError(f"{name}: found a tensor {tuple(tensor.shape)} that is not contiguous; it cannot be moved")
        offsets.append(total)
        total += -(-tensor.numel() // step) * step
    memory = torch.zeros(total, dtype=tensors[0].dtype, device=tensors[0].device)
    for tensor, offset in zip(tensors, offsets, strict=True):
        place = memory[offset : offset + tensor.numel()].view(tensor.shape)
        place.copy_(tensor.detach())
        tensor.data = place
    return Arena(name=name, memory=memory, members=tuple(zip(tensors, offsets, strict=True)))
