"""Who takes part in the run, as the loop sees it: asked at each boundary, before each update, after each iteration.

`FixedMembership` is a run without resilience: nobody comes or goes, and nothing runs for it. `SwitchedMembership` is
one whose machines can be replaced; the ending rides on its vote, so that an iteration has no message more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from megatron.training.ending import Ending, EndingWatch

if TYPE_CHECKING:  # it needs the extension, which a run without resilience may do without
    from megatron.resilience.worker.meter import Meter
    from megatron.resilience.worker.rank_worker import RankWorker


class Membership(Protocol):
    """What the loop calls, on every rank alike."""

    def reach_boundary(self, iteration: int) -> None:
        """The top of `iteration`. May wait for a switch; raises SlotMoved where another process goes on."""

    def vote(self, iteration: int, obstacles: tuple[str, ...]) -> None:
        """Nothing but the optimizer step of `iteration` is left. `obstacles`: why no switch may follow it."""

    def paused(self) -> AbstractContextManager[None]:
        """What is done inside (evaluation, saving) does not count as time of an iteration."""

    def ending(self, iteration: int) -> Ending:
        """Whether the run ends after `iteration`, the same on all ranks."""


class FixedMembership:
    """The same processes from the first iteration to the last."""

    def __init__(self, watch: EndingWatch) -> None:
        self._watch = watch

    def reach_boundary(self, iteration: int) -> None:
        """Nothing to do."""

    def vote(self, iteration: int, obstacles: tuple[str, ...]) -> None:
        """Nothing to do."""

    def paused(self) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def ending(self, iteration: int) -> Ending:
        """See Membership. Collective where a signal or time limit is watched."""
        return self._watch.agree(iteration)


class SwitchedMembership:
    """Machines may be replaced between two iterations; `meter` takes the time of these."""

    def __init__(self, watch: EndingWatch, worker: RankWorker, meter: Meter) -> None:
        self._watch = watch
        self._worker = worker
        self._meter = meter
        self._ending = Ending.GOES_ON

    def reach_boundary(self, iteration: int) -> None:
        """See Membership."""
        self._worker.reach_boundary(iteration)

    def vote(self, iteration: int, obstacles: tuple[str, ...]) -> None:
        """See Membership. Collective."""
        result = self._worker.vote(iteration, obstacles=obstacles, exits=int(self._watch.seen(iteration)))
        self._ending = Ending(result.exit)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """See Membership."""
        began_s = time.monotonic()
        yield
        self._meter.leave_out(time.monotonic() - began_s)

    def ending(self, iteration: int) -> Ending:
        """What the vote of `iteration` said."""
        return self._ending
