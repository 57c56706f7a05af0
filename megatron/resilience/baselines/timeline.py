"""When each iteration of a run ended, from the records of its metrics file; and what an interruption cost. Pure."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Mapping

MEDIAN_OVER = 20


def iteration_ends(lines: Iterable[str]) -> list[tuple[int, float]]:
    """(iteration, seconds since the epoch at its end), in the order written. An unfinished last line is left out."""
    ends = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("kind") == "time":
            ends.append((int(record["iteration"]), float(record["ended_s"])))
    return ends


def median_iteration_ms(ends: list[tuple[int, float]], *, up_to: int) -> float:
    """Median of the last iterations up to `up_to`. Raises ValueError with fewer than two of them."""
    times = [end_s for iteration, end_s in ends if iteration <= up_to]
    durations = [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times)]
    if not durations:
        raise ValueError(f"found {len(times)} iterations up to {up_to}, expected at least two to take a median of")
    return statistics.median(durations[-MEDIAN_OVER:])


def gap_ms(before: list[tuple[int, float]], after: list[tuple[int, float]]) -> float:
    """From the last end before an interruption to the first one after it."""
    return (after[0][1] - before[-1][1]) * 1e3


def split(gap_ms: float, marks_ms: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Phases of a gap from the times, since its start, at which each ended; the last lasts until the gap's end."""
    phases, begun_ms = [], 0.0
    names = list(marks_ms)
    for name in names:
        ended_ms = gap_ms if name == names[-1] else min(max(marks_ms[name], begun_ms), gap_ms)
        phases.append((name, ended_ms - begun_ms))
        begun_ms = ended_ms
    return tuple(phases)
