"""Compares what two runs of a job recorded, to the last bit, and names where they first part. Pure.

A run's metrics file has a record an iteration (losses, gradient norm, learning rate, loss scale, skipped or not), one
an evaluation, and at the end the digest of each rank's state. Floats are written so that they read back exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_NOT_COMPARED = {"time"}

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two runs first part: in which iteration, in what, and both values."""

    iteration: int
    what: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.what} is {self.found!r}, expected {self.expected!r}"


def read_records(lines: Iterable[str]) -> list[Record]:
    """The records that are compared, in order. Raises ValueError for a line that is no record."""
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            kind = record["kind"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of the metrics: found {line[:80]!r}, expected a record as JSON") from error
        if kind not in _NOT_COMPARED:
            records.append(record)
    return records


def first_difference(expected: Sequence[Record], found: Sequence[Record]) -> Difference | None:
    """None if the runs are equal in every bit."""
    for ours, theirs in zip(found, expected, strict=False):
        difference = _between(theirs, ours)
        if difference is not None:
            return difference
    if len(expected) == len(found):
        return None
    longer = expected if len(expected) > len(found) else found
    record = longer[min(len(expected), len(found))]
    what = f"the record of kind {record['kind']!r}"
    return Difference(
        iteration=int(record["iteration"]),
        what=what,
        expected="there" if longer is expected else "none",
        found="none" if longer is expected else "there",
    )


def last_iteration(records: Sequence[Record]) -> int:
    """Of the last step; 0 without one."""
    return max((int(record["iteration"]) for record in records if record["kind"] == "step"), default=0)


def _between(expected: Record, found: Record) -> Difference | None:
    iteration = int(found.get("iteration", -1))
    for name in sorted(expected.keys() | found.keys(), key=lambda name: (name != "iteration", name)):
        if not _same(expected.get(name), found.get(name)):
            what, theirs, ours = _narrow(name, expected.get(name), found.get(name))
            return Difference(iteration=iteration, what=what, expected=theirs, found=ours)
    return None


def _narrow(name: str, expected: Any, found: Any) -> tuple[str, Any, Any]:
    """The part that differs: one loss of several, the state of one rank of all."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            if not _same(expected.get(key), found.get(key)):
                return str(key), expected.get(key), found.get(key)
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for rank, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
            if not _same(theirs, ours):
                return f"the state of global rank {rank} ({name})", theirs, ours
    return name.replace("_", " "), expected, found


def _same(one: Any, other: Any) -> bool:
    """Equality of bits: NaN equals itself, 0.0 is not -0.0, and 1 is not 1.0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
