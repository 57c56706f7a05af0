"""Proof that an inventory leaves nothing out: every tensor reachable from a rank's model, optimizer and schedule.

Called by tests, and by whoever adds a feature that keeps state. Walks objects as Python holds them (attributes,
containers, closures, what tensors carry along) and names each tensor whose memory is in neither arena nor small state.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from typing import Any

import torch

from megatron.resilience.state.arenas import parameter_buffers
from megatron.resilience.state.inventory import Inventory
from megatron.resilience.state.small_tensors import SCRATCH, small_tensors

_NO_STATE = (
    *(type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float, complex, Enum),
    *(torch.dtype, torch.device, torch.Size, torch.distributed.ProcessGroup),
)
_GRADIENTS = ("grad", "decoupled_grad")
"""Attributes of a tensor that are dead between two iterations."""


def unlisted_tensors(trainee: Any, inventory: Inventory) -> list[str]:
    """Path, type and shape of each reachable tensor that `inventory` does not hold; empty when it is complete."""
    known = {arena.memory.untyped_storage().data_ptr() for arena in inventory.arenas}
    known |= {small.tensor.untyped_storage().data_ptr() for small in small_tensors(trainee)}
    for chunk in trainee.model:
        known |= {buffer.grad_data.untyped_storage().data_ptr() for buffer in parameter_buffers(chunk)}
    found: dict[int, str] = {}
    for path, tensor in reachable_tensors(trainee):
        place = tensor.untyped_storage().data_ptr()
        if tensor.numel() and place not in known:
            found.setdefault(place, f"{path}: {tensor.dtype} {tuple(tensor.shape)}")
    return sorted(found.values())


def reachable_tensors(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of all that can be reached from `root`, each object once; gradients are not followed."""
    seen: dict[int, Any] = {}
    waiting: list[tuple[str, Any]] = [("trainee", root)]
    while waiting:
        path, item = waiting.pop()
        if item is None or id(item) in seen or isinstance(item, _NO_STATE):
            continue
        seen[id(item)] = item  # kept, so that no other object gets its id
        if torch.is_tensor(item):
            yield path, item
        waiting.extend(_parts_of(path, item))


def _parts_of(path: str, item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, Mapping):
        for key, value in list(item.items()):
            yield f"{path}[{key!r}]" if isinstance(key, str | int) else f"{path}[...]", value
            yield f"{path} key", key
    elif isinstance(item, list | tuple | Set):
        yield from ((f"{path}[{place}]", value) for place, value in enumerate(item))
    elif isinstance(item, functools.partial):
        yield from ((f"{path}.func", item.func), (f"{path}.args", item.args), (f"{path}.keywords", item.keywords))
    elif isinstance(item, types.MethodType):
        yield from ((f"{path}.__self__", item.__self__), (f"{path}.__func__", item.__func__))
    elif isinstance(item, types.FunctionType):
        yield f"{path}.__defaults__", item.__defaults__
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            yield f"{path}<{name}>", _content(cell)
    for name, value in _attributes(item).items():
        if not (torch.is_tensor(item) and name in _GRADIENTS) and name not in SCRATCH:
            yield f"{path}.{name}", value


def _attributes(item: Any) -> dict[str, Any]:
    attributes = dict(getattr(item, "__dict__", None) or {})
    for kind in type(item).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(kind).get(name), types.MemberDescriptorType):
                attributes[name] = getattr(item, name, None)
    return attributes


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None
