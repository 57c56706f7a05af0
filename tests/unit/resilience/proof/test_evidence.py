"""No step, no digest, no migration: no verdict, and the words say what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.resilience.proof.compare import Record
from megatron.resilience.proof.evidence import gap_in_migrations, gap_in_records, last_try
from megatron.resilience.proof.schedule import Move

MOVES = (Move(iteration=2, slots=(1, 0)), Move(iteration=4, slots=(1,)))


def steps(*iterations: int) -> list[Record]:
    return [{"kind": "step", "iteration": iteration} for iteration in iterations]


def state(*digests: str | None) -> list[Record]:
    return [{"kind": "state", "iteration": 6, "sha256": list(digests), "small_sha256": list(digests)}]


def incident(boundary: int, *slots: int, **changed: Any) -> dict[str, Any]:
    return {"outcome": "done", "why": "", "slots": list(slots), "boundary": boundary, **changed}


DONE = [incident(3, 0, 1), incident(6, 1)]
WHOLE = [*steps(1, 2, 3, 4, 5, 6), {"kind": "evaluation", "iteration": 6}, *state("aa", "bb")]


def test_a_whole_run_has_no_gap() -> None:
    assert gap_in_records(WHOLE, 2) == ""
    assert gap_in_migrations(WHOLE, MOVES, DONE) == ""


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "found no step in the metrics"),
        (state("aa", "bb"), "found no step in the metrics"),
        (steps(1, 2), "found 0 records of the final state, expected one"),
        ([*WHOLE, *state("aa", "bb")], "found 2 records of the final state, expected one"),
        ([*steps(1), *state("aa")], "expected a digest of each of 2 ranks"),
        ([*steps(1), *state("aa", "bb", "cc")], "expected a digest of each of 2 ranks"),
        ([*steps(1), *state("aa", "")], "expected a digest of each of 2 ranks"),
        ([*steps(1), *state("aa", None)], "expected a digest of each of 2 ranks"),
        ([*steps(1), {"kind": "state", "iteration": 1}], "found the final state (sha256) None"),
        ([*steps(1), {**state("aa", "bb")[0], "small_sha256": ["aa", ""]}], "found the final state (small_sha256)"),
    ],
)
def test_runs_that_recorded_too_little_prove_nothing(records: list[Record], words: str) -> None:
    assert words in gap_in_records(records, 2)


def test_a_move_is_judged_by_its_last_try() -> None:
    given_up = incident(-1, 1, outcome="aborted", why="its machine is dead")
    told = [incident(3, 0, 1), given_up, incident(6, 1)]
    assert gap_in_migrations(WHOLE, MOVES, [*last_try(told[:1], 0), *last_try(told, 1)]) == ""
    assert "was not done" in gap_in_migrations(WHOLE, MOVES, [*last_try(told[:1], 0), *last_try(told[:2], 1)])
    assert "found 1 migrations" in gap_in_migrations(WHOLE, MOVES, [*last_try(told[:1], 0), *last_try(told[:1], 1)])


@pytest.mark.parametrize(
    ("incidents", "words"),
    [
        ([], "found 0 migrations, expected 2"),
        (DONE[:1], "found 1 migrations, expected 2"),
        ([*DONE, incident(5, 0)], "found 3 migrations, expected 2"),
        ([DONE[0], incident(-1, 1, outcome="aborted", why="no machine")], "was not done: aborted: no machine"),
        ([DONE[0], incident(6, 0)], "found slots [0] moved, expected [1]"),
        ([incident(3, 0), DONE[1]], "found slots [0] moved, expected [0, 1]"),
        ([DONE[0], incident(7, 1)], "found no step of iteration 7 in the metrics"),
        ([incident(1, 0, 1), DONE[1]], "found no step of iteration 0 in the metrics"),
    ],
)
def test_moves_that_were_not_made_between_two_steps_prove_nothing(incidents: list[Any], words: str) -> None:
    assert words in gap_in_migrations(WHOLE, MOVES, incidents)
