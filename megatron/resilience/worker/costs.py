"""What a switch cost this rank, as the message that tells the controller: time, links, bytes, memory, phases.

Called by `rank_worker` at each boundary and step of a switch; `meter` does the arithmetic of time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.resilience.protocol.messages import Measured
from megatron.resilience.worker.memory import MemoryLook
from megatron.resilience.worker.meter import Meter


class Costs:
    """`memory`: what looks at the memory of this rank. `is_new`: it was started for this very switch, and so has no
    memory before it to compare with. `meter`: of its iterations; where it joins, of those of the rank before it too.
    """

    def __init__(self, memory: MemoryLook, meter: Meter, *, is_new: bool) -> None:
        self._memory = memory
        self._is_new = is_new
        self._meter = meter
        self._links_before: int | None = None
        self._memory_before = 0
        self._arrived_s = time.monotonic()
        self._since_s: float | None = None
        self._phases: dict[str, tuple[float, float]] = {}
        self.links = (0, 0)
        """Kept and replaced at the last commit."""

    def announce(self, since_s: float) -> None:
        """A switch has begun somewhere at `since_s` of this process's monotonic clock; preparation here follows."""
        self._since_s = since_s

    def begin(self) -> None:
        """Preparation begins on this rank; nothing has been prepared yet."""
        self._meter.begin(time.monotonic() if self._since_s is None else self._since_s)
        self._since_s = None
        self._remember_links()

    def granted(self, generation: int, boundary: int) -> None:
        """All ranks switch at the top of iteration `boundary`."""
        self._meter.granted(generation, boundary)
        self._remember_links()

    def drop(self) -> None:
        """The switch that was prepared is off."""
        self._meter.drop()
        self._forget()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is done inside is a phase of the switch."""
        started_s = time.monotonic()
        yield
        ended_s = time.monotonic()
        self._phases[name] = ((started_s - self._arrived_s) * 1e3, (ended_s - started_s) * 1e3)

    def median_iteration_ms(self) -> float:
        """Of the last iterations."""
        return self._meter.median_ms()

    def arrive(self, iteration: int, bytes_moved: int) -> Measured | None:
        """The rank stands at the top of `iteration`; what the switch cost, one iteration after it.

        Tensors are counted at two such places: the first one since preparation began, and one iteration after.
        """
        self._arrived_s = time.monotonic()
        cost = self._meter.arrive(iteration, self._arrived_s)
        if cost is None:
            if self._links_before is not None and not self._memory_before and not self._is_new:
                self._memory_before = self._links_before + self._memory.tensor_bytes()
            return None
        measured = Measured(
            generation=cost.generation,
            boundary=cost.boundary,
            downtime_ms=cost.downtime_ms,
            lost_ms=cost.lost_ms,
            median_iteration_ms=cost.median_iteration_ms,
            links_kept=self.links[0],
            links_replaced=self.links[1],
            bytes_moved=bytes_moved,
            memory_before_bytes=self._memory_before,
            memory_after_bytes=self._memory.link_bytes() + self._memory.tensor_bytes(),
            peak_bytes=self._memory.peak_bytes(),
            phases=dict(self._phases),
        )
        self._is_new = False
        self._forget()
        return measured

    def _remember_links(self) -> None:
        if self._links_before is None:
            self._links_before = self._memory.link_bytes()

    def _forget(self) -> None:
        self._links_before, self._memory_before, self.links = None, 0, (0, 0)
        self._phases.clear()
