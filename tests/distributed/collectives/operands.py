"""The memory of one rank's part in one call: what it gives, where results go, what they must be. For runner.py.

What a rank gives is a slice of one pool of random numbers a type, so every rank knows what every other one gave.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tests.distributed.collectives import reference
from tests.distributed.collectives.schedules import ELEMENTS_MAX, Call

_POOL = 2 * ELEMENTS_MAX + 1009
_GUARD = 64
_GUARD_BYTE = 0x5A

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


@cache
def pool(dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, of several magnitudes, for floats; any bits for integers."""
    generator = torch.Generator().manual_seed(7)
    if dtype == torch.bool:
        return torch.randint(0, 2, (_POOL,), generator=generator, dtype=torch.uint8).bool()
    if dtype in reference.INTEGERS:
        random = torch.randint(0, 256, (_POOL * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        return random.view(dtype)
    numbers = torch.randn(_POOL, generator=generator) * 10.0 ** torch.randint(-3, 3, (_POOL,), generator=generator)
    return numbers.to(dtype)


@cache
def _pool_sum(dtype: torch.dtype) -> int:
    return _sum_of(pool(dtype))


def _sum_of(tensor: torch.Tensor) -> int:
    return zlib.crc32(_bytes(tensor).numpy().tobytes())


def prepare() -> None:
    """Once, before ranks are forked."""
    for dtype in (*reference.DTYPES, torch.complex64, torch.float8_e4m3fn):
        _pool_sum(dtype)


def check_inputs() -> None:
    """Nobody wrote to what was only given."""
    for dtype in (*reference.DTYPES, torch.complex64, torch.float8_e4m3fn):
        assert _sum_of(pool(dtype)) == _pool_sum(dtype), f"inputs of {dtype} were written to"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


class Operands:
    """`size` ranks are in the group, of which this one is `rank`."""

    def __init__(self, seed: int, call: Call, rank: int, size: int) -> None:
        self.call = call
        self.rank = rank
        self.size = size
        self._key = struct.pack("<QI", seed, call.number)
        self._guarded: list[torch.Tensor] = []
        self._expected: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
        self.checks: list[Callable[[], None]] = []

    @property
    def at_root(self) -> bool:
        return self.rank == self.call.root

    def given(self, rank: int, count: int, piece: int = 0) -> torch.Tensor:
        """What `rank` gives as its `piece`; only to be read."""
        begin = zlib.crc32(self._key + struct.pack("<II", rank, piece)) % (_POOL - count)
        return pool(self.call.dtype)[begin : begin + count]

    def all_given(self, count: int, piece: int = 0) -> list[torch.Tensor]:
        return [self.given(rank, count, piece) for rank in range(self.size)]

    def room(self, count: int) -> torch.Tensor:
        """Memory for `count` elements between guards."""
        whole = torch.full((count * self.call.dtype.itemsize + 2 * _GUARD,), _GUARD_BYTE, dtype=torch.uint8)
        self._guarded.append(whole)
        return whole[_GUARD : len(whole) - _GUARD].view(self.call.dtype)

    def copied(self, source: torch.Tensor) -> torch.Tensor:
        return self.room(source.numel()).copy_(source)

    def expect(self, found: torch.Tensor, wanted: Callable[[], torch.Tensor]) -> None:
        self._expected.append((found, wanted))

    def check(self) -> None:
        for check in self.checks:
            check()
        for number, (found, wanted) in enumerate(self._expected):
            assert_equal_bits(found, wanted(), f"result {number} on group rank {self.rank} of {self.size}")
        for whole in self._guarded:
            guards = torch.cat([whole[:_GUARD], whole[len(whole) - _GUARD :]])
            assert bool((guards == _GUARD_BYTE).all()), "something was written beside a result"


def assert_equal_bits(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    mine, theirs = _bytes(found.contiguous()), _bytes(wanted.contiguous())
    assert len(mine) == len(theirs), f"{what}: {len(mine)} bytes, expected {len(theirs)}"
    if torch.equal(mine, theirs):
        return
    (wrong,) = torch.nonzero(mine != theirs, as_tuple=True)
    first = int(wrong[0]) // found.element_size()
    raise AssertionError(
        f"{what}: {len(wrong)} of {len(mine)} bytes differ, first in element {first}: found {found[first].item()!r}, "
        f"expected {wanted[first].item()!r}"
    )


Works = list[Any]
Start = Callable[[Operands, Any], Works]
STARTS: dict[str, Start] = {}


def _start(function: Start) -> Start:
    STARTS[function.__name__.lstrip("_")] = function
    return function


def _options(options: Any, call: Call, **more: Any) -> Any:
    if call.op:
        options.reduceOp = OPS[call.op]
    for name, value in more.items():
        setattr(options, name, value)
    return options


def one_count(memory: Operands) -> int:
    return memory.call.counts[0][0]


def _cut(tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.split(tensor, list(counts)))


@_start
def _all_reduce(memory: Operands, group: Any) -> Works:
    tensor = all_reduce_operand(memory, one_count(memory), 0)
    return [group.allreduce([tensor], _options(c10d.AllreduceOptions(), memory.call))]


def all_reduce_operand(memory: Operands, count: int, piece: int) -> torch.Tensor:
    tensor = memory.copied(memory.given(memory.rank, count, piece))
    memory.expect(tensor, lambda: reference.all_reduce(memory.all_given(count, piece), memory.call.op))
    return tensor


@_start
def _all_reduce_coalesced(memory: Operands, group: Any) -> Works:
    counts = memory.call.counts[0]
    tensors = [all_reduce_operand(memory, count, piece) for piece, count in enumerate(counts)]
    return [group.allreduce_coalesced(tensors, _options(c10d.AllreduceCoalescedOptions(), memory.call))]


@_start
def _reduce(memory: Operands, group: Any) -> Works:
    count = one_count(memory)
    tensor = memory.copied(memory.given(memory.rank, count))
    if memory.at_root:
        memory.expect(tensor, lambda: reference.reduce(memory.all_given(count), memory.call.op))
    return [group.reduce([tensor], _options(c10d.ReduceOptions(), memory.call, rootRank=memory.call.root))]


def _reduce_scatter_result(memory: Operands, counts: Sequence[int]) -> torch.Tensor:
    pieces = [[memory.given(rank, count, piece) for piece, count in enumerate(counts)] for rank in range(memory.size)]
    return reference.reduce_scatter(pieces, memory.call.op, memory.rank)


@_start
def _reduce_scatter(memory: Operands, group: Any) -> Works:
    counts = memory.call.counts[0]
    output = memory.room(counts[memory.rank])
    inputs = [memory.given(memory.rank, count, piece) for piece, count in enumerate(counts)]
    memory.expect(output, lambda: _reduce_scatter_result(memory, counts))
    return [group.reduce_scatter([output], [inputs], _options(c10d.ReduceScatterOptions(), memory.call))]


def reduce_scatter_operands(memory: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    count = one_count(memory)
    counts = [count] * memory.size
    whole = memory.room(count * memory.size)
    for piece, part in enumerate(_cut(whole, counts)):
        part.copy_(memory.given(memory.rank, count, piece))
    output = _cut(whole, counts)[memory.rank] if memory.call.in_place else memory.room(count)
    memory.expect(output, lambda: _reduce_scatter_result(memory, counts))
    return output, whole


@_start
def _reduce_scatter_tensor(memory: Operands, group: Any) -> Works:
    output, whole = reduce_scatter_operands(memory)
    return [group._reduce_scatter_base(output, whole, _options(c10d.ReduceScatterOptions(), memory.call))]


@_start
def _broadcast(memory: Operands, group: Any) -> Works:
    return [group.broadcast([broadcast_operand(memory)], _options(
        c10d.BroadcastOptions(), memory.call, rootRank=memory.call.root))]  # fmt: skip


def broadcast_operand(memory: Operands) -> torch.Tensor:
    count, root = one_count(memory), memory.call.root
    tensor = memory.room(count)
    if memory.at_root:
        tensor.copy_(memory.given(root, count))
    memory.expect(tensor, lambda: memory.given(root, count))
    return tensor


@_start
def _all_gather(memory: Operands, group: Any) -> Works:
    counts = memory.call.counts[0]
    outputs = [memory.room(count) for count in counts]
    for rank, output in enumerate(outputs):
        memory.expect(output, lambda rank=rank: memory.given(rank, counts[rank]))  # type: ignore[misc]
    return [group.allgather([outputs], [memory.given(memory.rank, counts[memory.rank])], c10d.AllgatherOptions())]


def all_gather_operands(memory: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    count = one_count(memory)
    whole = memory.room(count * memory.size)
    part = memory.given(memory.rank, count)
    if memory.call.in_place:
        part = whole[memory.rank * count : (memory.rank + 1) * count].copy_(part)
    memory.expect(whole, lambda: torch.cat(memory.all_given(count)))
    return whole, part


@_start
def _all_gather_into_tensor(memory: Operands, group: Any) -> Works:
    return [group._allgather_base(*all_gather_operands(memory), c10d.AllgatherOptions())]


@_start
def _gather(memory: Operands, group: Any) -> Works:
    count = one_count(memory)
    outputs = [memory.room(count) for _ in range(memory.size)] if memory.at_root else []
    for rank, output in enumerate(outputs):
        memory.expect(output, lambda rank=rank: memory.given(rank, count))  # type: ignore[misc]
    options = _options(c10d.GatherOptions(), memory.call, rootRank=memory.call.root)
    return [group.gather([outputs] if memory.at_root else [], [memory.given(memory.rank, count)], options)]


@_start
def _scatter(memory: Operands, group: Any) -> Works:
    count, root = one_count(memory), memory.call.root
    output = memory.room(count)
    inputs = [memory.given(root, count, piece) for piece in range(memory.size)]
    memory.expect(output, lambda: inputs[memory.rank])
    options = _options(c10d.ScatterOptions(), memory.call, rootRank=root)
    return [group.scatter([output], [inputs] if memory.at_root else [], options)]


def _exchanged(memory: Operands) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What this rank gives each, and what it must get of each."""
    counts = memory.call.counts
    gives = [memory.given(memory.rank, count, piece) for piece, count in enumerate(counts[memory.rank])]
    gets = [memory.given(rank, counts[rank][memory.rank], memory.rank) for rank in range(memory.size)]
    return gives, gets


@_start
def _all_to_all(memory: Operands, group: Any) -> Works:
    gives, gets = _exchanged(memory)
    outputs = [memory.room(wanted.numel()) for wanted in gets]
    for output, wanted in zip(outputs, gets, strict=True):
        memory.expect(output, lambda wanted=wanted: wanted)  # type: ignore[misc]
    return [group.alltoall(outputs, gives, c10d.AllToAllOptions())]


@_start
def _all_to_all_single(memory: Operands, group: Any) -> Works:
    gives, gets = _exchanged(memory)
    given = memory.copied(torch.cat(gives))
    output = memory.room(sum(wanted.numel() for wanted in gets))
    memory.expect(output, lambda: torch.cat(gets))
    sizes = [[tensor.numel() for tensor in tensors] for tensors in (gets, gives)]
    return [group.alltoall_base(output, given, *sizes, c10d.AllToAllOptions())]


@_start
def _barrier(memory: Operands, group: Any) -> Works:
    del memory
    return [group.barrier(c10d.BarrierOptions())]


@_start
def _send(memory: Operands, group: Any) -> Works:
    count, (sender,), root = one_count(memory), memory.call.senders, memory.call.root
    if not memory.at_root:
        return [group.send([memory.given(sender, count)], root, memory.call.tag)]
    received = memory.room(count + (5 if memory.call.in_place else 0))  # a longer buffer is filled from its begin
    memory.expect(received[:count], lambda: memory.given(sender, count))
    return [group.recv([received], sender, memory.call.tag)]


@_start
def _any_source(memory: Operands, group: Any) -> Works:
    count, call = one_count(memory), memory.call
    if not memory.at_root:
        return [
            group.send([memory.given(memory.rank, count, piece)], call.root, call.tag)
            for piece in range(call.senders.count(memory.rank))
        ]
    received = [memory.room(count) for _ in call.senders]
    works = [group.recv_anysource([tensor], call.tag) for tensor in received]

    def check() -> None:
        seen = dict.fromkeys(call.senders, 0)
        for work, tensor in zip(works, received, strict=True):
            sender = work._source_rank()
            assert sender in seen, f"a message came from {sender}; only {call.senders} sent"
            wanted = memory.given(sender, count, seen[sender])
            assert_equal_bits(tensor, wanted, f"message {seen[sender]} of group rank {sender}")
            seen[sender] += 1
        assert all(number == call.senders.count(sender) for sender, number in seen.items()), str(seen)

    memory.checks.append(check)
    return works


@_start
def _exchange(memory: Operands, group: Any) -> Works:
    """Each sends to the next and receives from the one before, twice."""
    count = one_count(memory)
    to, source = (memory.rank + 1) % memory.size, (memory.rank - 1) % memory.size
    works = [group.send([memory.given(memory.rank, count, piece)], to, 7) for piece in range(2)]
    for piece in range(2):
        received = memory.room(count)
        memory.expect(received, lambda piece=piece: memory.given(source, count, piece))  # type: ignore[misc]
        works.append(group.recv([received], source, 7))
    return works


prepare()
