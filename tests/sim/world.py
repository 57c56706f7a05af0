"""Simulated time, chance and connections: everything that happens in a simulation, happens here, in one order.

A seed drives all of it, so that a failing run is run again exactly. Time is in milliseconds.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

Deed = Callable[..., object]


class Stuck(Exception):  # noqa: N818 - what was found
    """Somebody waits for ever: the simulation came to its limit undecided."""


class World:
    """The queue of what will happen, the clock, and the only source of chance."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.now_ms = 0.0
        self.steps = 0
        self.transcript: list[str] | None = None
        self._queue: list[tuple[float, int, Deed, tuple[object, ...]]] = []
        self._number = 0

    def after(self, delay_ms: float, deed: Deed, *arguments: object) -> None:
        """Does `deed` after a delay."""
        self._number += 1
        heapq.heappush(self._queue, (self.now_ms + delay_ms, self._number, deed, arguments))

    def between(self, low_ms: float, high_ms: float) -> float:
        return self.chance.uniform(low_ms, high_ms)

    def run(self, *, until: Callable[[], bool], limit_ms: float) -> None:
        """Goes on until `until` holds. Raises Stuck at `limit_ms`, or when nothing will ever happen again."""
        while not until():
            if not self._queue:
                raise Stuck(f"at {self.now_ms:.0f} ms nothing will ever happen again")
            when_ms, _, deed, arguments = heapq.heappop(self._queue)
            if when_ms > limit_ms:
                raise Stuck(f"undecided after {limit_ms:.0f} ms")
            self.now_ms = when_ms
            self.steps += 1
            deed(*arguments)

    def say(self, line: str) -> None:
        """A line of the transcript, if one is kept."""
        if self.transcript is not None:
            self.transcript.append(f"{self.now_ms:8.1f}  {line}")


class Pipe:
    """One direction of a connection: messages arrive in order, each after a delay of its own, until it is cut."""

    def __init__(
        self,
        world: World,
        deliver: Callable[[Any], None],
        low_ms: float = 0.5,
        high_ms: float = 8.0,
        *,
        stalls: float = 0.0,
    ) -> None:
        self.world = world
        self.deliver = deliver
        self.low_ms, self.high_ms = low_ms, high_ms
        self.stalls = stalls
        """How likely a message is held up for long, with all that come after it."""
        self.is_open = True
        self._last_ms = 0.0

    def send(self, message: Any) -> None:
        if not self.is_open:
            return
        delay_ms = self.world.between(self.low_ms, self.high_ms)
        if self.stalls and self.world.chance.random() < self.stalls:
            delay_ms += self.world.between(10, 400)
        arrival_ms = max(self._last_ms, self.world.now_ms + delay_ms)
        self._last_ms = arrival_ms
        self.world.after(arrival_ms - self.world.now_ms, self._arrive, message)

    def _arrive(self, message: Any) -> None:
        if self.is_open:
            self.deliver(message)

    def cut(self) -> None:
        """What is under way is lost."""
        self.is_open = False
