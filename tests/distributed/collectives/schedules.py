"""Random schedules: which operations the ranks of a job start, in one order for all. A function of the seed alone.

Whoever keeps to that order may wait for what it has started whenever it likes: the first operation in it that has not
ended has been started by all its members, or by some who wait for an earlier one, which has ended.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from tests.distributed.collectives.reference import DTYPES, operations

REDUCTIONS = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")
MOVES = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)
MESSAGES = ("send", "any_source", "exchange")
KINDS = (*REDUCTIONS, *MOVES, *MESSAGES)
DIRECT = frozenset(
    ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "gather", "scatter",
     "all_to_all_single", "barrier", "send")
)  # fmt: skip
"""What Communicator has too."""
ELEMENTS_MAX = 300_000
_WHOLE_MAX = 600_000
_MOVED_TYPES = (*DTYPES, torch.complex64, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A job's groups by global rank. The first is the world, once as a group of torch, once as a Communicator."""

    size: int
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operation. Ranks here are group ranks; `counts` are elements."""

    number: int
    group: int
    kind: str
    dtype: torch.dtype
    op: str
    counts: tuple[tuple[int, ...], ...]
    """`counts[r][i]`: of what rank r gives for, or as, number i. One row where all ranks give the same."""
    root: int
    """Of rooted operations; who receives, of messages."""
    senders: tuple[int, ...]
    """Of messages; a rank may be there twice."""
    tag: int
    in_place: bool
    direct: bool
    """By Communicator instead of torch.distributed; blocks."""


def layout_of(seed: int, size: int | None = None) -> Layout:
    """2 to 8 ranks, the world and some overlapping groups."""
    chance = random.Random(f"layout {seed}")
    size = size or chance.randint(2, 8)
    groups = [tuple(range(size))]
    groups += [tuple(sorted(chance.sample(range(size), chance.randint(2, size)))) for _ in range(chance.randint(1, 4))]
    if chance.random() < 0.3:
        groups.append((chance.randrange(size),))
    return Layout(size=size, groups=tuple(groups))


def schedule_of(seed: int, layout: Layout, length: int | None = None) -> list[Call]:
    """5 to 25 calls, or `length`."""
    chance = random.Random(f"schedule {seed}")
    length = length or chance.randint(5, 25)
    return [_call(chance, number, layout) for number in range(length)]


def _call(chance: random.Random, number: int, layout: Layout) -> Call:
    group = chance.randrange(len(layout.groups))
    size = len(layout.groups[group])
    kind = chance.choice(KINDS if size > 1 else (*REDUCTIONS, *MOVES))
    dtype = chance.choice(DTYPES if kind in REDUCTIONS else _MOVED_TYPES)
    root = chance.randrange(size)
    others = [rank for rank in range(size) if rank != root]
    senders: tuple[int, ...] = ()
    if kind == "send":
        senders = (chance.choice(others),)
    elif kind == "any_source":
        senders = tuple(chance.choices(others, k=chance.randint(1, 2 * len(others))))
    return Call(
        number=number,
        group=group,
        kind=kind,
        dtype=dtype,
        op=chance.choice(operations(dtype)) if kind in REDUCTIONS else "",
        counts=_counts(chance, kind, size),
        root=root,
        senders=senders,
        tag=1000 + number if kind == "any_source" else chance.randrange(3),
        in_place=chance.random() < 0.3,
        direct=group == 0 and kind in DIRECT and chance.random() < 0.4,
    )


def _count(chance: random.Random) -> int:
    """Mostly small; now and then one that is sent in pieces, or around the ring."""
    largest = chance.choices((0, 16, 2_000, 20_000, ELEMENTS_MAX), (6, 38, 36, 15, 5))[0]
    return chance.randint(largest // 20, largest)


def _counts(chance: random.Random, kind: str, size: int) -> tuple[tuple[int, ...], ...]:
    if kind == "barrier":
        return ((),)
    if kind == "all_reduce_coalesced":
        return (tuple(_count(chance) for _ in range(chance.randint(1, 3))),)
    if kind in ("reduce_scatter", "all_gather"):
        return (tuple(min(_count(chance), _WHOLE_MAX // size) for _ in range(size)),)
    if kind in ("all_to_all", "all_to_all_single"):
        bound = _WHOLE_MAX // (size * size)
        largest = min(_count(chance), bound)
        return tuple(tuple(chance.randint(0, largest) for _ in range(size)) for _ in range(size))
    if kind in ("reduce_scatter_tensor", "all_gather_into_tensor", "gather", "scatter"):
        return ((min(_count(chance), _WHOLE_MAX // size),),)
    return ((_count(chance),),)
