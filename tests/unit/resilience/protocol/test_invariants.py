"""Each check raises for what must never be, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.resilience.protocol import invariants
from megatron.resilience.protocol.invariants import InvariantViolation, Voter
from megatron.resilience.protocol.journal import SwitchBegun

VOTER = Voter(iteration=4, global_rank=1, machine_id="m1", generation=1)


def test_one_holder() -> None:
    holders: dict[tuple[int, int], str] = {}
    invariants.check_one_holder(VOTER, {}, holders)
    invariants.check_one_holder(replace(VOTER, iteration=5, machine_id="m2", generation=2), {(4, 1): VOTER}, holders)
    with pytest.raises(InvariantViolation, match="two processes"):
        invariants.check_one_holder(replace(VOTER, machine_id="m2", generation=2), {(4, 1): VOTER}, holders)
    with pytest.raises(InvariantViolation, match="m1 holds that rank"):
        invariants.check_one_holder(replace(VOTER, iteration=6, machine_id="m3"), {}, holders)


def test_one_boundary_and_one_verdict() -> None:
    boundaries: dict[int, int] = {}
    verdicts: dict[int, bool] = {}
    for rank in range(3):
        invariants.check_one_boundary(2, rank, 9, boundaries)
        invariants.check_same_verdict(2, rank, False, verdicts)
    with pytest.raises(InvariantViolation, match="others at 9"):
        invariants.check_one_boundary(2, 3, 10, boundaries)
    with pytest.raises(InvariantViolation, match="LEAVE=True"):
        invariants.check_same_verdict(2, 3, True, verdicts)


def test_links_of_one_generation() -> None:
    other = Voter(iteration=4, global_rank=2, machine_id="m2", generation=5)
    invariants.check_link(VOTER, other, 5, 1)
    for knows in ((1, 1), (5, 5), (4, 1)):
        with pytest.raises(InvariantViolation, match="cross generations"):
            invariants.check_link(VOTER, other, *knows)


def test_fresh_generations() -> None:
    def begun(generation: int) -> SwitchBegun:
        return SwitchBegun(time_ms=0.0, generation=generation, command_id="c", moves=())

    invariants.check_fresh([begun(2), begun(3), begun(7)])
    for wrong in ([begun(1)], [begun(2), begun(2)], [begun(3), begun(2)]):
        with pytest.raises(InvariantViolation, match="used again"):
            invariants.check_fresh(wrong)


def test_whole_state() -> None:
    invariants.check_whole(2, [1, 2], [2, 1, 0])
    with pytest.raises(InvariantViolation, match=r"\[1\] have no whole state"):
        invariants.check_whole(2, [1, 2], [2])
