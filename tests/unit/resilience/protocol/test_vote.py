"""The vote: exit beats switch, a veto beats a cast, and the boundary is the next iteration."""

from __future__ import annotations

import itertools

import pytest

from megatron.resilience.protocol.vote import Contribution, Decision, boundary_of, combine, contribution, decide


def test_a_contribution_is_three_numbers() -> None:
    assert contribution(cast=0, obstacles=(), exits=False).numbers() == (0, 0, 0)
    assert contribution(cast=7, obstacles=("a save is not finalised",), exits=True).numbers() == (7, 1, 1)
    assert contribution(cast=0, obstacles=("",), exits=False).numbers() == (0, 0, 0)


@pytest.mark.parametrize(("cast", "veto", "exits"), itertools.product([0, 5], [0, 1], [0, 1]))
def test_decision(cast: int, veto: int, exits: int) -> None:
    expected = Decision.CONTINUE
    if cast:
        expected = Decision.VETOED if veto else Decision.SWITCH
    if exits:
        expected = Decision.EXIT
    assert decide(Contribution(cast=cast, veto=veto, exit=exits)) is expected


def test_one_veto_and_one_exit_of_any_rank_count() -> None:
    lead, far = Contribution(cast=3), Contribution()
    assert decide(combine([far, lead, far])) is Decision.SWITCH
    assert decide(combine([far, lead, Contribution(veto=1)])) is Decision.VETOED
    assert decide(combine([lead, Contribution(veto=1), Contribution(exit=1)])) is Decision.EXIT
    with pytest.raises(ValueError, match="expected one of each rank"):
        combine([])


def test_boundary_is_the_next_iteration() -> None:
    assert boundary_of(10) == 11
