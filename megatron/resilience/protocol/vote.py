"""The vote before every optimizer step (rule P4): what a rank contributes, and what the result decides. Pure.

One MAX all-reduce of three int64 over all ranks; it runs in every iteration, so a switch adds no message.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

VOTE_NUMBERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Three numbers of one rank, and of the result of all: (generation cast or 0, veto, exit)."""

    cast: int = 0
    veto: int = 0
    exit: int = 0

    def numbers(self) -> tuple[int, int, int]:
        """As they travel."""
        return (self.cast, self.veto, self.exit)


class Decision(enum.Enum):
    """What all ranks do after the vote."""

    CONTINUE = "continue"
    VETOED = "vetoed"
    SWITCH = "switch"
    EXIT = "exit"


def contribution(*, cast: int, obstacles: Iterable[str], exits: int) -> Contribution:
    """What a rank gives. `obstacles` are its reasons against a switch at the next iteration; any one is a veto."""
    return Contribution(cast=cast, veto=int(any(obstacles)), exit=int(exits))


def combine(contributions: Iterable[Contribution]) -> Contribution:
    """The MAX of all, as the all-reduce forms it."""
    numbers = [one.numbers() for one in contributions]
    if not numbers:
        raise ValueError("found no contribution, expected one of each rank")
    cast, veto, exits = (max(column) for column in zip(*numbers, strict=True))
    return Contribution(cast=cast, veto=veto, exit=exits)


def decide(result: Contribution) -> Decision:
    """Exit beats switch; a veto beats a cast, which is then cast again at a later vote."""
    if result.exit:
        return Decision.EXIT
    if not result.cast:
        return Decision.CONTINUE
    return Decision.VETOED if result.veto else Decision.SWITCH


def boundary_of(iteration: int) -> int:
    """A switch granted in `iteration` happens at the top of the next one, for every rank at once (rule P5)."""
    return iteration + 1
