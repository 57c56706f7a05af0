"""In which operation two runs of a job first part, by the traces that the data plane writes (TRAINMOVER_TRACE). Pure.

A line of a trace is an operation that ended: its number in its process, the iteration, when it was called (ns), its
group's name and global ranks, its name, the peer of a message (group rank), bytes given and got, a hash of what it was
given, a hash of what it gave, and when it ended. Of a rank that moved there are two traces, one process after another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_FIELDS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperation:
    """One line."""

    number: int
    iteration: int
    called_ns: int
    group: str
    global_ranks: tuple[int, ...]
    operation: str
    peer: int
    given_bytes: int
    got_bytes: int
    given: str
    got: str
    ended_ns: int


Trace: TypeAlias = Mapping[int, Sequence[TracedOperation]]
"""The operations of each global rank, in the order of its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationDifference:
    """The first operation that is not the same. `number` counts those of its group and kind on its rank, from 1."""

    iteration: int
    global_rank: int
    operation: str
    number: int
    global_ranks: tuple[int, ...]
    bytes: int
    how: str
    at_ns: int

    def __str__(self) -> str:
        group = ", ".join(map(str, self.global_ranks))
        return (
            f"in iteration {self.iteration}, on global rank {self.global_rank}, {self.operation} number {self.number} "
            f"among global ranks {group} ({self.bytes} bytes): {self.how}"
        )


def read_trace(lines: Iterable[str]) -> list[TracedOperation]:
    """The operations of one process, in the order of its calls. Raises ValueError for a line that is none.

    The last line may be cut: its process was ended while it wrote.
    """
    operations = []
    for line in lines:
        fields = line.split("\t")
        if not line.endswith("\n"):
            continue
        if len(fields) != _FIELDS:
            raise ValueError(f"found {line[:80]!r} in a trace, expected {_FIELDS} fields with tabs between them")
        number, iteration, called, group, ranks, operation, peer, given_bytes, got_bytes, given, got, ended = fields
        operations.append(
            TracedOperation(
                number=int(number),
                iteration=int(iteration),
                called_ns=int(called),
                group=group,
                global_ranks=tuple(int(rank) for rank in ranks.split(",")),
                operation=operation,
                peer=int(peer),
                given_bytes=int(given_bytes),
                got_bytes=int(got_bytes),
                given=given,
                got=got,
                ended_ns=int(ended),
            )
        )
    return sorted(operations, key=lambda one: one.number)


def joined(traces: Iterable[Sequence[TracedOperation]]) -> list[TracedOperation]:
    """The operations of one rank, of one process after the other."""
    began = sorted((trace for trace in traces if trace), key=lambda trace: trace[0].called_ns)
    return [operation for trace in began for operation in trace]


def first_operation(expected: Trace, again: Trace, found: Trace) -> OperationDifference | None:
    """Where `found` first parts from `expected`; None: nowhere.

    What differs between `expected` and `again`, two runs that came to the same, says nothing (names of folders, what a
    buffer held before). Nor do groups that only one of the runs has, and what is done outside of iterations.
    """
    differences = [
        difference
        for rank in sorted(expected.keys() & found.keys())
        for difference in _on(rank, _queues(expected[rank]), _queues(again.get(rank, ())), _queues(found[rank]))
    ]
    return min(differences, key=lambda difference: difference.at_ns, default=None)


_Key: TypeAlias = tuple[str, str, int]


def _queues(operations: Sequence[TracedOperation]) -> dict[_Key, list[TracedOperation]]:
    """Those that come in an order that all ranks share: collectives of a group; messages to one peer, and from it."""
    queues = defaultdict(list)
    for one in operations:
        if one.iteration == 0:
            continue
        kind = "" if one.peer < 0 else one.operation
        queues[(one.group, kind, one.peer)].append(one)
    return queues


def _on(
    rank: int,
    expected: Mapping[_Key, Sequence[TracedOperation]],
    again: Mapping[_Key, Sequence[TracedOperation]],
    found: Mapping[_Key, Sequence[TracedOperation]],
) -> Iterable[OperationDifference]:
    """The first of each queue."""
    for key in expected.keys() & found.keys():
        for number, (theirs, other, ours) in enumerate(
            zip(expected[key], again.get(key, ()), found[key], strict=False), 1
        ):
            how, at_ns = _how(theirs, other, ours)
            if how:
                yield OperationDifference(
                    iteration=ours.iteration,
                    global_rank=rank,
                    operation=ours.operation,
                    number=number,
                    global_ranks=ours.global_ranks,
                    bytes=max(ours.given_bytes, ours.got_bytes),
                    how=how,
                    at_ns=at_ns,
                )
                break


def _how(expected: TracedOperation, again: TracedOperation, found: TracedOperation) -> tuple[str, int]:
    """In words, and when it was so; no words where there is no difference."""
    if found.operation != expected.operation:
        return f"another call, expected {expected.operation}", found.called_ns
    if expected.given == again.given != found.given:
        return "it was given other values", found.called_ns
    if expected.got == again.got != found.got:
        return "it was given the same and gave other values", found.ended_ns
    return "", 0
