"""What a rank owns beside its arenas, as one message: typed, bounded, checked as a whole before any of it is used.

Called by `inventory.py`. Nothing in it is pickled, so that bytes of a stranger can do no more than be refused.
Left out, because each iteration makes it anew before it is read: gradients, the scale of the experts' auxiliary
losses in the backward pass, scratch memory, and whatever groups, hooks and caches a rank builds for itself.
"""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from megatron.resilience.state.arenas import optimizer_parts
from megatron.resilience.state.data_parallel_flags import ChunkFlags, capture_flags, check_flags, restore_flags
from megatron.resilience.state.errors import StateError
from megatron.resilience.state.generators import (
    GeneratorStates,
    capture_generators,
    check_generators,
    restore_generators,
)
from megatron.resilience.state.plain_values import checked, is_plain, plain_values
from megatron.resilience.state.small_tensors import (
    SMALL_BYTES_MAX,
    PackedTensor,
    module_of,
    pack,
    small_tensors,
    unpack,
)

Values = dict[str, Any]
_RANK_OF_ITS_OWN = frozenset({"rank"})
_RERUN = (
    *("current_iteration", "first_iteration_complete", "rerun_requested", "checkpoint_requested"),
    *("restart_again_requested", "continue_requested", "logged_sdc_enabled", "suspicious_node", "suspicious_device"),
    *("large_value_counts", "max_values"),
)


class SmallState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message. Lists go by model chunk or by part of the optimizer."""

    bookkeeping: Values
    scheduler: Values
    parameter_groups: tuple[tuple[Values, ...], ...]
    grad_scalers: tuple[Values, ...]
    microbatches: Values
    rerun: Values
    rerun_state: str
    virtual_stage: int | None
    chunks: tuple[ChunkFlags, ...]
    generators: GeneratorStates
    tensors: dict[str, PackedTensor]
    expert_losses: dict[str, PackedTensor]


def capture_small_state(trainee: Any, bookkeeping: Values) -> bytes:
    """The small state of `trainee` as it is now. Raises StateError when it is bigger than it may be."""
    if not is_plain(bookkeeping):
        raise StateError(f"found bookkeeping {bookkeeping!r}, expected numbers, text, and lists and dicts of them")
    machine = get_rerun_state_machine()
    state = SmallState(
        bookkeeping=bookkeeping,
        scheduler=plain_values(vars(trainee.scheduler)),
        parameter_groups=tuple(tuple(_group_values(g) for g in _groups(part)) for part in _parts(trainee)),
        grad_scalers=tuple(_scaler_values(part) for part in _all_parts(trainee)),
        microbatches=plain_values(vars(_calculator()), leave_out=_RANK_OF_ITS_OWN),
        rerun=_rerun_values(machine),
        rerun_state=machine.state.name,
        virtual_stage=parallel_state.get_virtual_pipeline_model_parallel_rank(),
        chunks=tuple(capture_flags(chunk) for chunk in trainee.model),
        generators=capture_generators(),
        tensors={small.name: pack(small.tensor) for small in small_tensors(trainee)},
        expert_losses={name: pack(entry["values"]) for name, entry in get_moe_layer_wise_logging_tracker().items()},
    )
    payload = msgspec.msgpack.encode(state)
    if len(payload) > SMALL_BYTES_MAX:
        largest = max(state.tensors, key=lambda name: len(state.tensors[name].data), default="nothing")
        raise StateError(
            f"the small state has {len(payload)} bytes, expected at most {SMALL_BYTES_MAX}; its largest tensor is "
            f"{largest}, which belongs into an arena"
        )
    return payload


def structure_of(trainee: Any) -> str:
    """A text that is equal on two ranks whose small states have the same parts; known as soon as a rank is built."""
    parts = [f"{len(trainee.model)} chunks", type(trainee.scheduler).__name__]
    for part in _all_parts(trainee):
        kinds = (type(part), type(part.optimizer), type(getattr(part, "grad_scaler", None)))
        groups = [] if part.optimizer is None else [len(group["params"]) for group in _groups(part)]
        parts.append(f"{' '.join(kind.__name__ for kind in kinds)} {groups}")
    return "; ".join(parts)


def decode_small_state(payload: bytes) -> SmallState:
    """The message in `payload`. Raises StateError for anything else."""
    if len(payload) > SMALL_BYTES_MAX:
        raise StateError(f"found a small state of {len(payload)} bytes, expected at most {SMALL_BYTES_MAX}")
    try:
        return msgspec.msgpack.decode(payload, type=SmallState)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StateError(f"found bytes that are no small state: {error}") from error


def check_small_state(state: SmallState, trainee: Any) -> None:
    """Raises StateError unless all of `state` fits this rank; changes nothing."""
    checked("scheduler", state.scheduler, plain_values(vars(trainee.scheduler)))
    checked("microbatches", state.microbatches, plain_values(vars(_calculator()), leave_out=_RANK_OF_ITS_OWN))
    checked("rerun state machine", state.rerun, _rerun_values(get_rerun_state_machine()))
    groups = [list(_groups(part)) for part in _parts(trainee)]
    if [len(part) for part in state.parameter_groups] != [len(part) for part in groups]:
        raise StateError("found another number of parameter groups; do both ranks build the same model?")
    for found, here in _pairs(state, trainee):
        checked("parameter group", found, _group_values(here), same_names=False)
    scalers = [_scaler_values(part) for part in _all_parts(trainee)]
    if len(state.grad_scalers) != len(scalers):
        raise StateError(f"found {len(state.grad_scalers)} optimizers, expected {len(scalers)}")
    for values, own in zip(state.grad_scalers, scalers, strict=True):
        checked("grad scaler", values, own)
    if state.rerun_state not in type(get_rerun_state_machine().state).__members__:
        raise StateError(f"found rerun state {state.rerun_state!r}; do both ranks run the same megatron-core?")
    if len(state.chunks) != len(trainee.model):
        raise StateError(f"found {len(state.chunks)} model chunks, expected {len(trainee.model)}")
    for flags, chunk in zip(state.chunks, trainee.model, strict=True):
        check_flags(flags, chunk)
    check_generators(state.generators)
    _check_tensors(state, trainee)


def restore_small_state(state: SmallState, trainee: Any) -> None:
    """Puts all of `state`, which was checked, in force; random states last, as nothing may draw after them."""
    for owner, values in _owners(state, trainee):
        for key, value in checked("value", values, vars(owner), same_names=False).items():
            setattr(owner, key, value)
    machine = get_rerun_state_machine()
    machine.state = type(machine.state)[state.rerun_state]
    for found, group in _pairs(state, trainee):
        here = _group_values(group)
        for key in set(here) - set(found):
            del group[key]
        group.update(checked("parameter group", found, here, same_names=False))
    parallel_state.set_virtual_pipeline_model_parallel_rank(state.virtual_stage)
    for flags, chunk in zip(state.chunks, trainee.model, strict=True):
        restore_flags(flags, chunk)
    _restore_tensors(state, trainee)
    tracker = get_moe_layer_wise_logging_tracker()
    tracker.clear()
    for name, packed in state.expert_losses.items():
        losses = unpack(packed).to(torch.cuda.current_device())
        tracker[name] = {"values": losses, "reduce_group": None, "avg_group": None, "reduce_group_has_dp": False}
    restore_generators(state.generators)


def _owners(state: SmallState, trainee: Any) -> list[tuple[Any, Values]]:
    owners = [(trainee.scheduler, state.scheduler), (_calculator(), state.microbatches)]
    owners.append((get_rerun_state_machine(), state.rerun))
    scalers = (getattr(part, "grad_scaler", None) for part in _all_parts(trainee))
    owners += [(scaler, found) for scaler, found in zip(scalers, state.grad_scalers, strict=True) if scaler is not None]
    return owners


def _pairs(state: SmallState, trainee: Any) -> list[tuple[Values, Any]]:
    """(found values, group here) of each parameter group."""
    here = [group for part in _parts(trainee) for group in _groups(part)]
    return list(zip([values for part in state.parameter_groups for values in part], here, strict=True))


def _check_tensors(state: SmallState, trainee: Any) -> None:
    here = {small.name: small.tensor for small in small_tensors(trainee)}
    for name in sorted(set(here) - set(state.tensors)):
        raise StateError(f"tensor {name!r} is on this rank only; do both ranks build the same model?")
    for name, packed in {**state.tensors, **state.expert_losses}.items():
        unpack(packed)
        if name not in here and name not in state.expert_losses:
            module_of(trainee, name)
        if name in here and tuple(here[name].shape) != packed.shape:
            raise StateError(f"tensor {name!r}: found shape {packed.shape}, expected {tuple(here[name].shape)}")


def _restore_tensors(state: SmallState, trainee: Any) -> None:
    """In place where type and shape agree; megatron-core changes the type of some buffers at their first use."""
    here = {small.name: small for small in small_tensors(trainee)}
    for name, packed in state.tensors.items():
        tensor = unpack(packed)
        if name not in here:  # made by the first forward pass, which this rank has not had
            setattr(*module_of(trainee, name), tensor.to(torch.cuda.current_device()))
        elif here[name].tensor.dtype == tensor.dtype:
            with torch.no_grad():
                here[name].tensor.copy_(tensor)
        else:
            here[name].replace(tensor.to(here[name].tensor.device))


def _parts(trainee: Any) -> list[Any]:
    return list(optimizer_parts(trainee.optimizer))


def _all_parts(trainee: Any) -> list[Any]:
    """Stubs too: a rank without experts has one for them, whose loss scale moves as that of the others."""
    return list(getattr(trainee.optimizer, "chained_optimizers", [trainee.optimizer]))


def _groups(part: Any) -> list[Any]:
    return list(part.optimizer.param_groups)


def _group_values(group: dict[str, Any]) -> Values:
    strange = [key for key, value in group.items() if key != "params" and not is_plain(value)]
    if strange:
        raise StateError(f"parameter group: {strange[0]!r} is {group[strange[0]]!r}, expected a number or a word")
    return plain_values(group, leave_out=frozenset({"params"}))


def _scaler_values(part: Any) -> Values:
    scaler = getattr(part, "grad_scaler", None)
    return {} if scaler is None else plain_values(vars(scaler))


def _rerun_values(machine: Any) -> Values:
    """Its numbers and flags; its mode is a setting, and what it keeps during a rerun cannot be sent."""
    if machine.saved_state is not None or machine.data_iterator_checkpoints is not None:
        raise StateError("an iteration is being run again; state can be sent when that is over")
    return plain_values({name: getattr(machine, name) for name in _RERUN})


def _calculator() -> Any:
    """megatron-core's calculator of micro-batches, which it keeps to itself."""
    module = importlib.import_module("megatron.core.num_microbatches_calculator")
    return module._GLOBAL_NUM_MICROBATCHES_CALCULATOR
