"""Progress lines for pipes come at most every so often."""

from __future__ import annotations

import os

from megatron.resilience.agent.output import LineSink
from megatron.resilience.agent.progress import Progress, TrainingLine
from megatron.resilience.cli.view import PlainView


def test_progress_line_at_most_every_ten_seconds() -> None:
    now_s = 100.0
    reader, writer = os.pipe()
    view = PlainView(LineSink(writer), interval_s=10.0, clock=lambda: now_s)
    for iteration, now_s in ((1, 101.0), (2, 109.9), (3, 110.0), (4, 119.0), (5, 120.5)):  # noqa: B007 - the clock reads it
        line = TrainingLine(iteration=iteration, iterations=9, iteration_ms=1000.0, loss=None)
        view.progress(Progress().after(line))
    view.show(["log"])
    os.close(writer)
    assert os.read(reader, 1000).decode().splitlines() == [
        "progress: 3/9 iterations, 1000 ms each, ETA 0:06",
        "progress: 5/9 iterations, 1000 ms each, ETA 0:04",
        "log",
    ]
    os.close(reader)
