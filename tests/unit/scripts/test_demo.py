"""What the demo's summary takes from the incidents of its run, and how it tells it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.resilience.agent.driven_run import RunError
from scripts.demo import MIDDLE, Run, done_one, downtime_words, summary


def incident(**changes: Any) -> dict[str, Any]:
    facts = {"outcome": "done", "why": "", "leavers": ["machine-1"], "joiners": ["machine-4"], "boundary": 28}
    return {**facts, "downtime_ms": -3.2, "links_replaced": 22, "links_kept": 56, **changes}


def run() -> Run:
    steps = [{"iteration": number, "losses": {"lm loss": 8.0 - 0.1 * number}} for number in range(50)]
    return Run(steps=steps, state=["digest"], validation_loss=3.0, seconds=30.0)


def test_a_try_that_came_to_nothing_is_not_the_one_that_is_told() -> None:
    aborted = incident(outcome="aborted", why="the joiner died", boundary=-1)
    assert done_one([aborted, incident()])["boundary"] == 28
    with pytest.raises(RunError, match=r"found incidents .'aborted: the joiner died'., expected one that is done"):
        done_one([aborted])


def test_downtime_is_told_as_it_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert [downtime_words(value) for value in (-3.2, 484.4, None)] == ["-3 ms", "484 ms", "not measured"]
    straight = run()
    resumed = Run(steps=straight.steps[MIDDLE:], state=["digest"], validation_loss=3.0, seconds=9.0)
    assert summary(straight, resumed, None, incident()) == 0
    told = capsys.readouterr().out
    assert "by machine-4 at iteration 28: downtime -3 ms, 22 links replaced and 56 kept;" in told
    assert "below 0 if it was quicker" in told
    assert "trainmover incidents --resilience-dir build/demo/migrated/resilience" in told
