"""Takes the measurements, interleaved: in each round of a cell every subject has its turn, and each round begins with
another, so that a change of the machine's speed meets all alike. Called by collectives_bench.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.collectives.cells import Cell, Row, Subject, iterations_for

COMMAND_S = 120.0
RATE_S = 0.3


class Commanded(Protocol):
    """What measuring needs of a Job."""

    ranks: int

    def command(self, message: Mapping[str, Any], *, timeout_s: float, only: int | None = None) -> list[dict[str, Any]]:
        """See Job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured: rounds of a cell, and seconds of one subject in one round."""

    rounds: int
    round_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes a second of one core while `cores` are busy: adding one vector to another, and copying one."""

    cores: int
    reduce: float
    copy: float


def measure_cell(cell: Cell, jobs: Mapping[Subject, Commanded], effort: Effort) -> list[Row]:
    """One row a subject. Checks each subject's result before it is timed. Raises JobError."""
    subjects = list(jobs)
    iterations: dict[Subject, int] = {}
    for subject in subjects:
        _tell(jobs[subject], subject, cell, do="check")
        each_s = _tell(jobs[subject], subject, cell, do="measure", iterations=1)[0]["each_s"]
        iterations[subject] = iterations_for(each_s, effort.round_s)
    medians_us: dict[Subject, list[float]] = {subject: [] for subject in subjects}
    for number in range(effort.rounds):
        for subject in rotated(subjects, number):
            replies = _tell(jobs[subject], subject, cell, do="measure", iterations=iterations[subject])
            medians_us[subject].append(slowest_rank_median_us([reply["seconds"] for reply in replies]))
    return [
        Row(cell=cell, subject=subject, median_us=statistics.median(taken), best_us=min(taken))
        for subject, taken in medians_us.items()
    ]


def measure_rates(job: Commanded, size: int, cores: int, rounds: int) -> Rates:
    """Median over the rounds of one core's rates, with as many ranks at it as there are cores (or ranks)."""
    busy = min(cores, job.ranks)
    taken: dict[str, list[float]] = {"reduce": [], "copy": []}
    for _ in range(rounds):
        for kind, rates in taken.items():
            message = {"do": "rate", "kind": kind, "bytes": size, "seconds": RATE_S}
            replies = job.command(message, timeout_s=COMMAND_S, only=busy)
            rates.append(statistics.mean(reply["bytes_per_s"] for reply in replies))
    return Rates(cores=busy, reduce=statistics.median(taken["reduce"]), copy=statistics.median(taken["copy"]))


def slowest_rank_median_us(seconds: Sequence[Sequence[float]]) -> float:
    """`seconds[rank][iteration]`: the median over the iterations of the slowest rank's time, in microseconds."""
    return float(statistics.median(max(times) for times in zip(*seconds, strict=True))) * 1e6


def rotated(subjects: Sequence[Subject], number: int) -> list[Subject]:
    """The order of round `number`."""
    first = number % len(subjects)
    return [*subjects[first:], *subjects[:first]]


def _tell(job: Commanded, subject: Subject, cell: Cell, **more: Any) -> list[dict[str, Any]]:
    return job.command({"library": subject.library, "op": cell.op, "bytes": cell.bytes, **more}, timeout_s=COMMAND_S)
