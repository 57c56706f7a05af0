"""The tensors of a rank that lie outside its arenas: module buffers, step counters, loss scales. One list of them.

Called by `small_state.py`, which sends them, and by `completeness.py`, which looks for any that is missing here. They
are looked up each time: megatron-core replaces some of them as it goes (a loss scale at each change, an expert bias
when its precision is restored), so what was found once may be stale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from megatron.resilience.state.arenas import optimizer_parts
from megatron.resilience.state.errors import StateError

SMALL_BYTES_MAX = 64 << 20
"""Of all of them together; what is bigger belongs into an arena."""

SCRATCH = {
    "input_tensor": "what the stage before sent for one micro-batch; set before each forward pass, and big",
    "token_dispatcher": "routes one micro-batch; each forward pass writes its tensors before it reads them",
}
"""Attributes of modules whose tensors are not state, and why."""
_SCRATCH_DEPTH = 4
"""Of objects in objects."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}


class PackedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor's type, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTensor:
    """One of them. `replace` puts another tensor in its place, for when type or shape are not the sender's."""

    name: str
    tensor: torch.Tensor
    replace: Callable[[torch.Tensor], None]


def small_tensors(trainee: Any) -> Iterator[SmallTensor]:
    """All of them, under names that are the same on leaver and joiner, at this moment."""
    for index, chunk in enumerate(trainee.model):
        for name, module in chunk.named_modules():
            yield from _of_module(f"chunk{index}.{name}", module)
    for index, part in enumerate(optimizer_parts(trainee.optimizer)):
        yield from _of_steps(f"optimizer{index}", part)
    for index, part in enumerate(getattr(trainee.optimizer, "chained_optimizers", [trainee.optimizer])):
        yield from _attributes(f"optimizer{index}", part)
        if getattr(part, "grad_scaler", None) is not None:
            yield from _attributes(f"optimizer{index}.grad_scaler", part.grad_scaler)


def module_of(trainee: Any, name: str) -> tuple[Any, str]:
    """(module, attribute) of a name that `small_tensors` gave on another rank. Raises StateError if there is none."""
    head, _, path = name.partition(".")
    modules = {
        f"chunk{index}": dict(chunk.named_modules(remove_duplicate=False)) for index, chunk in enumerate(trainee.model)
    }
    module_path, _, attribute = path.rpartition(".")
    module = modules.get(head, {}).get(module_path)
    if module is None or not attribute.isidentifier():
        raise StateError(f"found a tensor {name!r}, which has no place here; do both ranks build the same model?")
    return module, attribute


def pack(tensor: torch.Tensor) -> PackedTensor:
    """`tensor` as bytes."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise StateError(f"found a tensor of type {name}, expected one of {', '.join(_DTYPES)}")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return PackedTensor(dtype=name, shape=tuple(tensor.shape), data=flat.numpy().tobytes())


def unpack(packed: PackedTensor) -> torch.Tensor:
    """The tensor that was packed, on the CPU. Raises StateError when type, shape and bytes do not go together."""
    dtype = _DTYPES.get(packed.dtype)
    count = 1
    for extent in packed.shape:
        count = count * extent if 0 <= extent <= SMALL_BYTES_MAX else -1
        if not 0 <= count <= SMALL_BYTES_MAX:
            break
    if dtype is None or count * dtype.itemsize != len(packed.data):
        raise StateError(f"found {packed.dtype}{list(packed.shape)} in {len(packed.data)} bytes; that is no tensor")
    if count == 0:
        return torch.empty(packed.shape, dtype=dtype)
    return torch.frombuffer(bytearray(packed.data), dtype=dtype).reshape(packed.shape)


def scratch_tensors(trainee: Any) -> Iterator[torch.Tensor]:
    """Those that modules hold under a name in SCRATCH, themselves or in plain objects; how big says the micro-batch."""
    for chunk in trainee.model:
        for module in chunk.modules():
            for key in SCRATCH:
                yield from _tensors_in(vars(module).get(key), depth=_SCRATCH_DEPTH)


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
        return
    if depth == 0 or isinstance(value, (torch.nn.Module, type)):
        return
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for part in (*parts, *getattr(value, "__dict__", {}).values()):
        yield from _tensors_in(part, depth - 1)


def _of_module(path: str, module: Any) -> Iterator[SmallTensor]:
    """Its buffers, persistent or not, and tensors that are plain attributes (such as rotary frequencies)."""
    prefix = path if path.endswith(".") else f"{path}."
    attributes = {key: value for key, value in vars(module).items() if key not in SCRATCH}
    for holder in (module._buffers, attributes):
        for key, value in list(holder.items()):
            if torch.is_tensor(value) and not isinstance(value, torch.nn.Parameter):
                yield SmallTensor(name=f"{prefix}{key}", tensor=value, replace=_setter(module, key))


def _of_steps(prefix: str, part: Any) -> Iterator[SmallTensor]:
    """State of a parameter that is one number, such as Adam's step."""
    for group_index, group in enumerate(part.optimizer.param_groups):
        for order, parameter in enumerate(group["params"]):
            state = part.optimizer.state.get(parameter, {})
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim() == 0:
                    place = functools.partial(state.__setitem__, name)
                    yield SmallTensor(name=f"{prefix}.{group_index}.{order}.{name}", tensor=value, replace=place)


def _attributes(prefix: str, owner: Any) -> Iterator[SmallTensor]:
    for key, value in list(vars(owner).items()):
        if torch.is_tensor(value):
            yield SmallTensor(name=f"{prefix}.{key}", tensor=value, replace=_setter(owner, key))


def _setter(owner: Any, key: str) -> Callable[[torch.Tensor], None]:
    return functools.partial(setattr, owner, key)
