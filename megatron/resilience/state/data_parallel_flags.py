"""megatron-core's bookkeeping of data parallelism, which a rank takes over. Called by `small_state.py`.

A bucket counts in its first iteration how often each gradient becomes ready and reduces by that count from then on; a
rank that took the first iteration for still to come would reduce at another moment than its peers. Likewise whether
parameters have been gathered since the last optimizer step: who gathers alone waits for ever.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatron.resilience.state.errors import StateError


class BucketFlags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group of buckets. Counts are (number of the parameter in the group, count)."""

    is_first_batch: bool
    is_last_microbatch: bool
    param_gather_dispatched: bool
    golden_counts: tuple[tuple[int, int], ...]
    ready_counts: tuple[tuple[int, int], ...]


class ChunkFlags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model chunk."""

    training: bool
    force_all_reduce: bool
    buckets: tuple[BucketFlags, ...]


def check_nothing_outstanding(chunk: Any) -> None:
    """Raises StateError when a gather or a reduction of `chunk` is under way: memory would change under way."""
    for number, group in enumerate(_groups(chunk)):
        for name in ("param_gather_handle", "grad_reduce_handle"):
            if getattr(group, name) is not None:
                raise StateError(
                    f"bucket group {number}: {name} is outstanding, expected none between two iterations; wait for it "
                    "before state is sent"
                )


def capture_flags(chunk: Any) -> ChunkFlags:
    """The flags of `chunk` as they are now."""
    return ChunkFlags(
        training=chunk.training,
        force_all_reduce=chunk.force_all_reduce,
        buckets=tuple(_capture_group(group) for group in _groups(chunk)),
    )


def check_flags(flags: ChunkFlags, chunk: Any) -> None:
    """Raises StateError when `flags` are of another chunk."""
    groups = _groups(chunk)
    if len(flags.buckets) != len(groups):
        raise StateError(
            f"found {len(flags.buckets)} bucket groups, expected {len(groups)}; are all settings the same?"
        )
    for number, (found, group) in enumerate(zip(flags.buckets, groups, strict=True)):
        places = [place for place, _ in (*found.golden_counts, *found.ready_counts)]
        if any(not 0 <= place < len(_parameters(group)) for place in places):
            raise StateError(
                f"bucket group {number}: found counts of {places}, expected {len(_parameters(group))} at most"
            )


def restore_flags(flags: ChunkFlags, chunk: Any) -> None:
    """Puts `flags`, which were checked, in force."""
    if chunk.training != flags.training:
        chunk.train(flags.training)
    chunk.force_all_reduce = flags.force_all_reduce
    for found, group in zip(flags.buckets, _groups(chunk), strict=True):
        parameters = _parameters(group)
        group.is_first_batch = found.is_first_batch
        group.is_last_microbatch = found.is_last_microbatch
        group.param_gather_dispatched = found.param_gather_dispatched
        group.golden_per_param_grad_ready_counts = {parameters[place]: count for place, count in found.golden_counts}
        group.per_param_grad_ready_counts = {parameters[place]: count for place, count in found.ready_counts}
        group.param_gather_handle = group.grad_reduce_handle = None


def _groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _parameters(group: Any) -> list[Any]:
    return [parameter for bucket in group.buckets for parameter in bucket.params_list]


def _capture_group(group: Any) -> BucketFlags:
    places = {parameter: place for place, parameter in enumerate(_parameters(group))}

    def counts(by_parameter: dict[Any, int]) -> tuple[tuple[int, int], ...]:
        return tuple(sorted((places[parameter], count) for parameter, count in by_parameter.items()))

    return BucketFlags(
        is_first_batch=group.is_first_batch,
        is_last_microbatch=group.is_last_microbatch,
        param_gather_dispatched=group.param_gather_dispatched,
        golden_counts=counts(group.golden_per_param_grad_ready_counts),
        ready_counts=counts(group.per_param_grad_ready_counts),
    )
