"""Rounds alternate, the slowest rank counts, and every result is checked before it is timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.collectives.cells import GLOO, OPENMPI, TRAINMOVER, Cell
from benchmarks.collectives.measure import Effort, measure_cell, measure_rates, rotated, slowest_rank_median_us

CELL = Cell(op="broadcast", ranks=2, bytes=1 << 10)
Log = list[tuple[str, str]]


class FakeJob:
    """Two ranks; the n-th timed command takes n milliseconds, and rank 1 always takes one more."""

    ranks = 2

    def __init__(self, log: Log, each_s: float = 0.01) -> None:
        self.log, self.each_s, self.timed = log, each_s, 0
        self.iterations: list[int] = []
        self.only: list[int | None] = []

    def command(self, message: Mapping[str, Any], *, timeout_s: float, only: int | None = None) -> list[dict[str, Any]]:
        assert timeout_s > 0
        self.only.append(only)
        if message["do"] == "rate":
            self.timed += 1
            speed = 100.0 * self.timed * (10 if message["kind"] == "copy" else 1)
            return [{"bytes_per_s": speed}, {"bytes_per_s": speed + 2}][:only]
        assert (message["op"], message["bytes"]) == (CELL.op, CELL.bytes)
        self.log.append((message["library"], message["do"]))
        if message["do"] == "check":
            return [{}, {}]
        self.iterations.append(message["iterations"])
        self.timed += message["iterations"] > 1
        seconds = [self.timed / 1000] * message["iterations"]
        return [
            {"seconds": seconds, "each_s": self.each_s},
            {"seconds": [each + 0.001 for each in seconds], "each_s": self.each_s},
        ]


def test_rounds_alternate_and_each_begins_with_another() -> None:
    log: Log = []
    jobs = {subject: FakeJob(log) for subject in (GLOO, TRAINMOVER, OPENMPI)}
    rows = measure_cell(CELL, jobs, Effort(rounds=3, round_s=0.1))
    names = ["gloo", "trainmover", "openmpi"]
    assert log[:6] == [(name, do) for name in names for do in ("check", "measure")]
    order = [name for name, _ in log[6:]]
    assert order == [*names, "trainmover", "openmpi", "gloo", "openmpi", "gloo", "trainmover"]
    assert [row.subject for row in rows] == list(jobs)
    assert all(job.iterations == [1, 10, 10, 10] for job in jobs.values()), "0.1 s hold ten of 0.01 s"


def test_a_row_holds_the_median_and_the_best_of_the_slowest_rank() -> None:
    (row,) = measure_cell(CELL, {GLOO: FakeJob([])}, Effort(rounds=3, round_s=0.1))
    assert row.median_us == pytest.approx(3000), "rounds of 2, 3 and 4 ms"
    assert row.best_us == pytest.approx(2000)


def test_the_slowest_rank_is_found_in_each_iteration() -> None:
    assert slowest_rank_median_us([[1e-6, 9e-6, 2e-6], [5e-6, 1e-6, 3e-6]]) == pytest.approx(5)
    with pytest.raises(ValueError, match="shorter"):
        slowest_rank_median_us([[1.0, 2.0], [1.0]])


def test_rotation_keeps_the_neighbours() -> None:
    subjects = [GLOO, TRAINMOVER, OPENMPI]
    assert [rotated(subjects, number) for number in range(4)] == [
        subjects,
        [TRAINMOVER, OPENMPI, GLOO],
        [OPENMPI, GLOO, TRAINMOVER],
        subjects,
    ]


@pytest.mark.parametrize(("cores", "busy", "more"), [(1, 1, 0), (2, 2, 1), (64, 2, 1)])
def test_rates_are_of_one_core_while_as_many_are_busy_as_there_are(cores: int, busy: int, more: int) -> None:
    job = FakeJob([])
    rates = measure_rates(job, 1 << 20, cores, 3)
    assert rates.cores == busy
    assert set(job.only) == {busy}
    assert (rates.reduce, rates.copy) == (300 + more, 4000 + more)
