"""The trainer's log line, and what is made of it."""

from __future__ import annotations

import pytest

from megatron.resilience.agent.progress import Progress, TrainingLine, clock, parse_training_line, summarize

LINE = (
    "[rank 7]  [2026-11-29 10:00:00.000000] iteration        3/     100 | consumed samples:           48 |"
    " elapsed time per iteration (ms): 312.4 | learning rate: 1.000000E-04 | global batch size:    16 |"
    " lm loss: 7.123456E+00 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |"
)


def line(iteration: int, loss: float | None = None, iteration_ms: float | None = 100.0) -> TrainingLine:
    return TrainingLine(iteration=iteration, iterations=100, iteration_ms=iteration_ms, loss=loss)


def test_figures_are_read() -> None:
    assert parse_training_line(LINE) == TrainingLine(iteration=3, iterations=100, iteration_ms=312.4, loss=7.123456)


def test_line_without_loss_is_still_progress() -> None:
    found = parse_training_line(" iteration 5/ 10 | learning rate: 1.0E-04 |")
    assert found == TrainingLine(iteration=5, iterations=10, iteration_ms=None, loss=None)


@pytest.mark.parametrize(
    "text", ["", "iteration 3", "saving checkpoint at iteration 3 to x", "validation loss at iteration 3 |"]
)
def test_other_lines_are_none(text: str) -> None:
    assert parse_training_line(text) is None


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_loss_that_is_no_number_is_read(loss: str) -> None:
    found = parse_training_line(LINE.replace("7.123456E+00", loss))
    assert found is not None
    assert str(found.loss) == loss


def test_progress_keeps_first_and_last_loss_and_ignores_slower_ranks() -> None:
    progress = Progress()
    for news in (line(10, 7.0), line(20, 6.0), line(10, 9.0), line(20, 5.0), line(30)):
        progress = progress.after(news)
    assert (progress.iteration, progress.first_loss, progress.last_loss) == (30, 7.0, 6.0)


def test_description_has_pace_and_eta() -> None:
    progress = Progress().after(line(30, iteration_ms=312.4))
    assert progress.describe() == "30/100 iterations, 312 ms each, ETA 0:22"
    assert Progress().after(line(30, iteration_ms=None)).describe() == "30/100 iterations"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (21.9, "0:22"),
        (59.6, "1:00"),
        (723, "12:03"),
        (3723, "1:02:03"),
        (float("nan"), "?"),
        (float("inf"), "?"),
    ],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_summary_says_only_what_is_known() -> None:
    progress = Progress().after(line(99, 7.123456)).after(line(100, 5.0))
    assert (
        summarize(progress, wall_s=42.123, log_dir="d") == "100 of 100 iterations, loss 7.12346 -> 5, 42.1 s, logs in d"
    )
    assert summarize(Progress(), wall_s=1, log_dir="d") == "1.0 s, logs in d"
