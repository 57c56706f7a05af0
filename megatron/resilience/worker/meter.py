"""What a switch cost this rank, from the times at which it reached the top of each iteration. Pure: times are given.

Downtime is the time from the boundary at which the switch happened to the next one, less the median iteration before
it; lost time is the same summed up over all iterations since the switch began. Neither is clamped. What the loop does
between two iterations (evaluation, saves) is in none of these times.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

MEDIAN_OVER = 20
_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCost:
    """In milliseconds; `boundary` is the iteration at whose top the switch happened."""

    generation: int
    boundary: int
    downtime_ms: float | None
    """None, as `lost_ms`: no iteration before it is known, to compare with."""
    lost_ms: float | None
    median_iteration_ms: float


class _Arrival(NamedTuple):
    """At the top of an iteration, by the clock, and by one that stands still while the loop does something else."""

    iteration: int
    at_s: float
    trained_s: float


class Meter:
    """Takes the time of each boundary; gives the cost of a switch one iteration after it."""

    def __init__(self) -> None:
        self._arrivals: deque[_Arrival] = deque(maxlen=_KEPT)
        self._paused_s = 0.0
        self._began_at: int | None = None
        self._switch: tuple[int, int] | None = None

    def begin(self, since_s: float) -> None:
        """A switch is prepared since `since_s`: iterations from the one then under way on may be slower for it."""
        if self._began_at is None and self._arrivals:
            before = [arrival.iteration for arrival in self._arrivals if arrival.at_s <= since_s]
            self._began_at = before[-1] if before else self._arrivals[0].iteration

    def drop(self) -> None:
        """The switch that was prepared is off."""
        self._began_at = self._switch = None

    def granted(self, generation: int, boundary: int) -> None:
        """All ranks switch at the top of iteration `boundary`."""
        self._switch = (generation, boundary)

    def leave_out(self, duration_s: float) -> None:
        """The loop has spent `duration_s` on something else than the iteration under way."""
        self._paused_s += duration_s

    def arrive(self, iteration: int, now_s: float) -> SwitchCost | None:
        """The rank stands at the top of `iteration`; the cost, if the iteration before it began with a switch.

        Where it joins, the rank whose place it takes has stood before it: the first arrival counts.
        """
        if not self._arrivals or self._arrivals[-1].iteration < iteration:
            self._arrivals.append(_Arrival(iteration, now_s, now_s - self._paused_s))
        if self._switch is None or iteration <= self._switch[1]:
            return None
        cost = self._cost(*self._switch)
        self.drop()
        return cost

    def median_ms(self, *, before: int | None = None) -> float:
        """Median of the last iterations, or of those that ended when iteration `before` began; 0 without any."""
        # The newest alone are looked at where they suffice: ranks ask for this every second.
        durations = self._durations(None if before is not None else MEDIAN_OVER)
        taken = [ms for iteration, ms in durations if before is None or iteration < before]
        return statistics.median(taken[-MEDIAN_OVER:]) if taken else 0.0

    def capture(self, now_s: float) -> dict[str, Any]:
        """For the rank that takes this one's place at a boundary: arrivals that its cost is made of, by their ages."""
        arrivals = list(self._arrivals)
        began_at = self._began_at if self._began_at is not None else arrivals[-1].iteration if arrivals else 0
        before = [place for place, arrival in enumerate(arrivals) if arrival.iteration < began_at]
        first = max(0, len(before) - MEDIAN_OVER)
        trained_s = now_s - self._paused_s
        ages = [[one.iteration, now_s - one.at_s, trained_s - one.trained_s] for one in arrivals[first:]]
        return {"began_at": began_at, "arrivals": ages}

    def restore(self, values: Mapping[str, Any], now_s: float) -> None:
        """Takes over what another rank captured; its clock began elsewhere, so times are told by how long ago."""
        trained_s = now_s - self._paused_s
        taken = [_Arrival(number, now_s - age_s, trained_s - old_s) for number, age_s, old_s in values["arrivals"]]
        self._arrivals = deque(taken, maxlen=_KEPT)
        self._began_at = values["began_at"] if taken else None

    def _durations(self, newest: int | None = None) -> list[tuple[int, float]]:
        first = 0 if newest is None else max(0, len(self._arrivals) - newest - 1)
        arrivals = [self._arrivals[place] for place in range(first, len(self._arrivals))]
        return [
            (earlier.iteration, (later.trained_s - earlier.trained_s) * 1e3)
            for earlier, later in itertools.pairwise(arrivals)
        ]

    def _cost(self, generation: int, boundary: int) -> SwitchCost:
        began_at = boundary if self._began_at is None else min(self._began_at, boundary)
        median_ms = self.median_ms(before=began_at) or self.median_ms(before=boundary)
        durations = self._durations()
        over = [(iteration, ms - median_ms) for iteration, ms in durations if began_at <= iteration <= boundary]
        return SwitchCost(
            generation=generation,
            boundary=boundary,
            downtime_ms=sum(ms for iteration, ms in over if iteration == boundary) if median_ms else None,
            lost_ms=sum(ms for _, ms in over) if median_ms else None,
            median_iteration_ms=median_ms,
        )
