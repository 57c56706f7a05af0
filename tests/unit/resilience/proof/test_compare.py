"""What counts as equal, and how the first difference of two runs is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.resilience.proof.compare import Record, first_difference, last_iteration, read_records

STATE = {"kind": "state", "iteration": 3, "sha256": ["aa", "bb"]}


def step(iteration: int, loss: float = 2.5, **changed: Any) -> Record:
    record = {"kind": "step", "iteration": iteration, "losses": {"lm loss": loss, "load": 0.5}, "grad_norm": 1.25}
    return {**record, "loss_scale": 1.0, "skipped": False, **changed}


def run(*steps: Record) -> list[Record]:
    return [*steps, STATE]


WHOLE = run(step(1), step(2), step(3))


def test_equal_runs_have_no_difference() -> None:
    assert first_difference(WHOLE, run(step(1), step(2), step(3))) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"losses": {"lm loss": 2.5000000000000004, "load": 0.5}}, "lm loss is 2.5000000000000004, expected 2.5"),
        ({"losses": {"lm loss": 2.5, "load": 0.25}}, "load is 0.25, expected 0.5"),
        ({"losses": {"lm loss": 2.5}}, "load is None, expected 0.5"),
        ({"grad_norm": 1.5}, "grad norm is 1.5, expected 1.25"),
        ({"grad_norm": None}, "grad norm is None, expected 1.25"),
        ({"loss_scale": 2.0}, "loss scale is 2.0, expected 1.0"),
        ({"skipped": True}, "skipped is True, expected False"),
    ],
)
def test_any_value_of_a_step_counts_and_is_named_with_its_iteration(changed: dict[str, Any], words: str) -> None:
    found = run(step(1), step(2, **changed), step(3, loss=9.0))
    difference = first_difference(WHOLE, found)
    assert str(difference) == f"iteration 2: {words}"


def test_the_state_of_a_rank_is_named_by_its_rank() -> None:
    found = [*WHOLE[:-1], {**STATE, "sha256": ["aa", "cc"]}]
    assert str(first_difference(WHOLE, found)) == (
        "iteration 3: the state of global rank 1 (sha256) is 'cc', expected 'bb'"
    )


def test_state_of_fewer_ranks_differs() -> None:
    difference = first_difference(WHOLE, [*WHOLE[:-1], {**STATE, "sha256": ["aa"]}])
    assert difference is not None
    assert difference.what == "sha256"


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (float("inf"), float("-inf"), False),
        (1, 1.0, False),
        (0.1 + 0.2, 0.3, False),
    ],
)
def test_values_are_compared_by_their_bits(one: float, other: float, equal: bool) -> None:
    assert (first_difference([step(1, one)], [step(1, other)]) is None) is equal


def test_a_run_that_ends_early_or_goes_on_differs() -> None:
    early = first_difference(WHOLE, WHOLE[:2])
    late = first_difference(WHOLE[:2], WHOLE)
    assert str(early) == "iteration 3: the record of kind 'step' is 'none', expected 'there'"
    assert str(late) == "iteration 3: the record of kind 'step' is 'there', expected 'none'"


def test_a_repeated_or_missing_iteration_differs() -> None:
    repeated = first_difference(WHOLE, run(step(1), step(1), step(2)))
    missing = first_difference(WHOLE, run(step(1), step(3)))
    assert str(repeated) == "iteration 1: iteration is 1, expected 2"
    assert str(missing) == "iteration 3: iteration is 3, expected 2"


def test_times_are_not_compared_and_floats_read_back_exactly() -> None:
    value = 0.1 + 0.2
    lines = [json.dumps(step(1, value)), '{"kind": "time", "iteration": 1, "ended_s": 5.0}']
    assert read_records(lines) == [step(1, value)]


@pytest.mark.parametrize("line", ["", "{", "[1]", '{"iteration": 1}', "null"])
def test_a_line_that_is_no_record_is_refused_by_its_number(line: str) -> None:
    with pytest.raises(ValueError, match=r"line 2 of the metrics: found .*, expected a record as JSON"):
        read_records([json.dumps(step(1)), line])


def test_the_last_iteration_is_that_of_the_last_step() -> None:
    assert last_iteration([]) == 0
    assert last_iteration([step(4), step(5), {"kind": "evaluation", "iteration": 6}]) == 5
