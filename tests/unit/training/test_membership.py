"""What the loop asks each iteration: nothing for a fixed job, one vote with the ending in it for a switched one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest

from megatron.resilience.protocol.vote import Contribution
from megatron.training.config import RunSettings
from megatron.training.ending import Ending, EndingWatch
from megatron.training.membership import FixedMembership, SwitchedMembership


class Worker:
    """Stands for the rank's part in switches; another rank's `ending` comes out of its vote."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        self.calls: list[tuple[Any, ...]] = []

    def reach_boundary(self, iteration: int) -> None:
        self.calls.append(("boundary", iteration))

    def vote(self, iteration: int, *, obstacles: tuple[str, ...], exits: int) -> Contribution:
        self.calls.append(("vote", iteration, obstacles, exits))
        return Contribution(cast=0, veto=0, exit=max(exits, int(self.ending)))


def switched(worker: Worker, **settings: Any) -> SwitchedMembership:
    return SwitchedMembership(EndingWatch(RunSettings(**settings)), cast("Any", worker))


def test_a_fixed_job_ends_as_its_watch_says() -> None:
    membership = FixedMembership(EndingWatch(RunSettings(exit_interval=3)))
    seen = []
    for iteration in (1, 2, 3):
        membership.reach_boundary(iteration)
        membership.vote(iteration, ())
        seen.append(membership.ending(iteration))
    assert seen == [Ending.GOES_ON, Ending.GOES_ON, Ending.INTERVAL_REACHED]


def test_a_switched_job_tells_boundary_obstacles_and_ending() -> None:
    worker = Worker(Ending.GOES_ON)
    membership = switched(worker, exit_interval=2)
    endings = []
    for iteration in (1, 2):
        membership.reach_boundary(iteration)
        membership.vote(iteration, ("a save",))
        endings.append(membership.ending(iteration))
    assert worker.calls == [
        ("boundary", 1),
        ("vote", 1, ("a save",), 0),
        ("boundary", 2),
        ("vote", 2, ("a save",), int(Ending.INTERVAL_REACHED)),
    ]
    assert endings == [Ending.GOES_ON, Ending.INTERVAL_REACHED]


def test_another_ranks_ending_ends_this_one() -> None:
    membership = switched(Worker(Ending.SIGNAL_CAME))
    membership.vote(1, ())
    assert membership.ending(1) is Ending.SIGNAL_CAME


@pytest.mark.parametrize("numbers", [(0, 0, 0), (2**40 + 3, 1, 3)])
def test_a_vote_of_one_rank_is_its_own(
    lone_rank: Callable[[str], AbstractContextManager[Any]], numbers: tuple[int, int, int]
) -> None:
    from megatron.training.membership import all_reduce_vote

    cast_, veto, exits = numbers
    own = Contribution(cast=cast_, veto=veto, exit=exits)
    with lone_rank(""):
        assert all_reduce_vote(own) == own
