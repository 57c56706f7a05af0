"""Which slots are to move when, in a proof: `ITERATION:SLOT[,SLOT...]`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FORM = re.compile(r"(\d+):(\d+(?:,\d+)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Once `iteration` has ended, the machines that hold `slots` are replaced, in one switch."""

    iteration: int
    slots: tuple[int, ...]


def parse_moves(texts: Sequence[str], *, machines: int) -> tuple[Move, ...]:
    """The moves in the order of their iterations. Raises ValueError."""
    moves = []
    for text in texts:
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"found {text!r}, expected ITERATION:SLOT or ITERATION:SLOT,SLOT, such as 20:1")
        slots = tuple(int(slot) for slot in found[2].split(","))
        if len(set(slots)) != len(slots):
            raise ValueError(f"found {text!r}, which names a slot twice; name each once")
        if max(slots) >= machines:
            raise ValueError(f"found slot {max(slots)} in {text!r}, expected slots from 0 to {machines - 1}")
        if int(found[1]) < 1:
            raise ValueError(f"found {text!r}, expected an iteration from 1 on: one must have ended before the switch")
        moves.append(Move(iteration=int(found[1]), slots=slots))
    return tuple(sorted(moves, key=lambda move: move.iteration))


def elastic_machines(moves: Sequence[Move]) -> int:
    """How many machines must be at hand: those of the largest move, for a machine that left is free again."""
    return max((len(move.slots) for move in moves), default=0)
