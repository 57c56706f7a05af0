"""Times of iterations as a run wrote them, and the parts of a gap."""

from __future__ import annotations

import pytest

from megatron.resilience.baselines.timeline import gap_ms, iteration_ends, median_iteration_ms, split


def test_only_whole_lines_of_times_are_read() -> None:
    lines = [
        '{"kind": "step", "iteration": 1}',
        '{"kind": "time", "iteration": 1, "ended_s": 100.5}',
        '{"kind": "time", "iteration": 2, "ended_s": 101.5}',
        '{"kind": "time", "iterat',
    ]
    assert iteration_ends(lines) == [(1, 100.5), (2, 101.5)]


def test_the_median_is_of_the_last_twenty_up_to_an_iteration() -> None:
    ends, now_s = [(0, 0.0)], 0.0
    for iteration in range(1, 41):
        now_s += 9.0 if iteration <= 20 or iteration > 40 else 0.1
        ends.append((iteration, now_s))
    ends.append((41, now_s + 50.0))
    assert median_iteration_ms(ends, up_to=40) == pytest.approx(100.0)
    assert median_iteration_ms(ends, up_to=20) == pytest.approx(9000.0)
    with pytest.raises(ValueError, match="found 1 iterations up to 0, expected at least two"):
        median_iteration_ms(ends, up_to=0)


def test_a_gap_lies_between_the_last_end_and_the_first_one_after() -> None:
    assert gap_ms([(1, 10.0), (2, 11.0)], [(3, 14.5), (4, 15.0)]) == pytest.approx(3500.0)


def test_phases_add_up_to_the_gap_whatever_the_marks_say() -> None:
    assert split(100.0, {"save": 30.0, "load": 80.0, "first": 100.0}) == (
        ("save", 30.0),
        ("load", 50.0),
        ("first", 20.0),
    )
    for marks in ({"save": 130.0, "load": 80.0, "first": 7.0}, {"save": -5.0, "load": -9.0, "first": 0.0}):
        phases = split(100.0, marks)
        assert sum(duration for _, duration in phases) == pytest.approx(100.0)
        assert min(duration for _, duration in phases) >= 0.0
