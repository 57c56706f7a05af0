"""Which slots move when: as a user writes it, and how many machines that takes."""

from __future__ import annotations

import pytest

from megatron.resilience.proof.schedule import Move, elastic_machines, parse_moves


def test_moves_come_in_the_order_of_their_iterations() -> None:
    assert parse_moves(["30:1", "10:0,2"], machines=3) == (
        Move(iteration=10, slots=(0, 2)),
        Move(iteration=30, slots=(1,)),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("20", "expected ITERATION:SLOT"),
        ("20:", "expected ITERATION:SLOT"),
        ("-1:0", "expected ITERATION:SLOT"),
        ("20:1,", "expected ITERATION:SLOT"),
        ("x:1", "expected ITERATION:SLOT"),
        ("20:1\n", "expected ITERATION:SLOT"),
        ("0:1", "found '0:1', expected an iteration from 1 on"),
        ("00:1", "expected an iteration from 1 on"),
        ("20:1,1", "names a slot twice"),
        ("20:0,3", "found slot 3 in '20:0,3', expected slots from 0 to 2"),
    ],
)
def test_what_cannot_be_done_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_moves(["10:0", text], machines=3)


def test_as_many_machines_are_at_hand_as_the_largest_move_takes() -> None:
    moves = parse_moves(["1:0", "2:1,2", "3:0"], machines=3)
    assert elastic_machines(moves) == 2
    assert elastic_machines(()) == 0
