"""The same operations by Communicator, which blocks: no works are left to wait for. For runner.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.distributed.collectives import reference
from tests.distributed.collectives.operands import (
    Operands,
    Start,
    Works,
    all_gather_operands,
    all_reduce_operand,
    broadcast_operand,
    one_count,
    reduce_scatter_operands,
)

DIRECT_STARTS: dict[str, Start] = {}


def _direct(function: Callable[[Operands, Any], object]) -> Callable[[Operands, Any], object]:
    def start(memory: Operands, communicator: Any) -> Works:
        function(memory, communicator)
        return []

    DIRECT_STARTS[function.__name__.removeprefix("_direct_")] = start
    return function


@_direct
def _direct_all_reduce(memory: Operands, communicator: Any) -> None:
    count, op = one_count(memory), memory.call.op
    if memory.call.in_place:
        communicator.all_reduce(all_reduce_operand(memory, count, 0), op)
        return
    output = memory.room(count)
    memory.expect(output, lambda: reference.all_reduce(memory.all_given(count), op))
    communicator.all_reduce(memory.given(memory.rank, count), output, op)


@_direct
def _direct_reduce(memory: Operands, communicator: Any) -> None:
    count, call = one_count(memory), memory.call
    output = memory.room(count) if memory.at_root else None
    if output is not None:
        memory.expect(output, lambda: reference.reduce(memory.all_given(count), call.op))
    communicator.reduce(memory.given(memory.rank, count), output, op=call.op, root=call.root)


@_direct
def _direct_reduce_scatter_tensor(memory: Operands, communicator: Any) -> None:
    output, whole = reduce_scatter_operands(memory)
    communicator.reduce_scatter(whole, output, memory.call.op)


@_direct
def _direct_all_gather_into_tensor(memory: Operands, communicator: Any) -> None:
    whole, part = all_gather_operands(memory)
    communicator.all_gather(part, whole)


@_direct
def _direct_broadcast(memory: Operands, communicator: Any) -> None:
    communicator.broadcast(broadcast_operand(memory), root=memory.call.root)


@_direct
def _direct_gather(memory: Operands, communicator: Any) -> None:
    count = one_count(memory)
    output = memory.room(count * memory.size) if memory.at_root else None
    if output is not None:
        memory.expect(output, lambda: torch.cat(memory.all_given(count)))
    communicator.gather(memory.given(memory.rank, count), output, root=memory.call.root)


@_direct
def _direct_scatter(memory: Operands, communicator: Any) -> None:
    count, root = one_count(memory), memory.call.root
    output = memory.room(count)
    pieces = [memory.given(root, count, piece) for piece in range(memory.size)]
    memory.expect(output, lambda: pieces[memory.rank])
    communicator.scatter(memory.copied(torch.cat(pieces)) if memory.at_root else None, output, root=root)


@_direct
def _direct_all_to_all_single(memory: Operands, communicator: Any) -> None:
    count = memory.call.counts[0][0]  # equal parts
    output = memory.room(count * memory.size)
    gives = torch.cat([memory.given(memory.rank, count, piece) for piece in range(memory.size)])
    memory.expect(output, lambda: torch.cat(memory.all_given(count, memory.rank)))
    communicator.all_to_all(memory.copied(gives), output)


@_direct
def _direct_barrier(memory: Operands, communicator: Any) -> None:
    del memory
    communicator.barrier()


@_direct
def _direct_send(memory: Operands, communicator: Any) -> None:
    count, (sender,), call = one_count(memory), memory.call.senders, memory.call
    if not memory.at_root:
        communicator.send(memory.given(sender, count), call.root, tag=call.tag)
        return
    received = memory.room(count)
    memory.expect(received, lambda: memory.given(sender, count))
    assert communicator.recv(received, sender, tag=call.tag) == sender
