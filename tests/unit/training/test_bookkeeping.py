"""The loop's counters are taken over whole or not at all; clocks go on as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from megatron.resilience.worker.handover import Handover
from megatron.training import preload  # noqa: F401  (device and patches first)
from megatron.training.bookkeeping import LoopBookkeeping
from megatron.training.checkpointing import Checkpointer, Progress
from megatron.training.ending import EndingWatch
from megatron.training.reporting import Reporter

LoneRank = Callable[[str], AbstractContextManager[Any]]


def fresh(rank: Any, links: Any = None) -> LoopBookkeeping:
    return LoopBookkeeping(
        progress=Progress(),
        reporter=Reporter(rank.plan, speaks=True),
        checkpointer=Checkpointer(rank.plan),
        watch=EndingWatch(rank.plan.settings.run),
        links=links or Handover(),
    )


def worn(rank: Any) -> LoopBookkeeping:
    """Counters after some steps, a save, and a signal."""
    made = fresh(rank)
    made.progress.iteration, made.progress.skipped_iterations = 7, 2
    made.progress.consumed_train_samples, made.progress.consumed_valid_samples = 14, 3
    made.reporter.step(7, 14, rank.step(1), None)  # type: ignore[attr-defined]
    made.checkpointer.restore({"went_on_from": 4, "has_saved": True, "newest_saved": 6, "background_saves": 1})
    made.watch._signal_came = True  # type: ignore[attr-defined]
    return made


def without_clocks(values: dict[str, Any]) -> dict[str, Any]:
    values["reporter"].pop("started_s")
    values["watch"].pop("elapsed_s")
    return values


def test_all_counters_are_taken_over(lone_rank: LoneRank) -> None:
    with lone_rank("--log-interval 3") as rank:
        own, taken = worn(rank), fresh(rank)
        assert without_clocks(taken.capture()) != without_clocks(own.capture())
        taken.restore(own.capture())
        assert without_clocks(taken.capture()) == without_clocks(own.capture())
        assert taken.progress == own.progress


def test_the_next_log_line_averages_over_both_ranks_steps(
    lone_rank: LoneRank, capsys: pytest.CaptureFixture[str]
) -> None:
    with lone_rank("--log-interval 2") as rank:
        own, taken = fresh(rank), fresh(rank)
        first, second = rank.step(1), rank.step(2)
        own.reporter.step(1, 2, first, None)  # type: ignore[attr-defined]
        taken.restore(own.capture())
        taken.reporter.step(2, 4, second, None)  # type: ignore[attr-defined]
        mean = (first.losses["lm loss"] + second.losses["lm loss"]) / 2
        assert f"lm loss: {mean:.6E}" in capsys.readouterr().out


def test_clocks_go_on(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        own, taken = fresh(rank), fresh(rank)
        own.watch.restore({"elapsed_s": 100.0, "signal_came": False})
        own.reporter.restore({**own.reporter.capture(), "started_s": 50.0})
        taken.restore(own.capture())
        assert taken.watch.capture()["elapsed_s"] == pytest.approx(100.0, abs=5.0)
        assert taken.reporter.capture()["started_s"] == pytest.approx(50.0, abs=5.0)
        assert time.monotonic() > 0


@pytest.mark.parametrize("part", ["progress", "reporter", "checkpointer", "watch"])
@pytest.mark.parametrize("wrong", [None, {}, "text"])
def test_counters_of_another_release_are_refused_and_change_nothing(lone_rank: LoneRank, part: str, wrong: Any) -> None:
    with lone_rank("") as rank:
        own, taken = worn(rank), fresh(rank)
        before = without_clocks(taken.capture())
        with pytest.raises(ValueError, match=f"found {part} .*do both ranks run the same release"):
            taken.restore({**own.capture(), part: wrong})
        assert without_clocks(taken.capture()) == before


def test_a_place_that_the_links_refuse_changes_nothing(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        own, taken = worn(rank), fresh(rank, Handover(generation=2))
        before = without_clocks(taken.capture())
        with pytest.raises(ValueError, match="expected the text of handover"):
            taken.restore(own.capture())
        assert without_clocks(taken.capture()) == before
