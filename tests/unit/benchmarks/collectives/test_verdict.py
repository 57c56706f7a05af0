"""Each aim is met at its limit and missed just beyond it."""

from __future__ import annotations

import pytest

from benchmarks.collectives.cells import DIRECT, GLOO, OPENMPI, TRAINMOVER, TRAINMOVER_TCP, Cell, Row
from benchmarks.collectives.measure import Rates
from benchmarks.collectives.verdict import by_place, geometric_mean, least_all_reduce_s, speedups, verdicts
from tests.unit.benchmarks.conftest import MakeRow

LARGE = 64 << 20
RATES = Rates(cores=2, reduce=14e9, copy=13e9)


def only(rows: list[Row], rates: dict[int, Rates] | None = None) -> tuple[bool | None, str]:
    (verdict,) = verdicts(rows, rates or {})
    return verdict.met, verdict.text


def test_geometric_mean_treats_double_and_half_alike() -> None:
    assert geometric_mean([2, 0.5]) == pytest.approx(1)
    assert geometric_mean([1, 4, 16]) == pytest.approx(4)
    with pytest.raises(ValueError, match="found no value"):
        geometric_mean([])


def test_speedup_is_their_time_over_ours_where_both_are_known(make_row: MakeRow) -> None:
    rows = [make_row(GLOO, 300), make_row(TRAINMOVER, 100), make_row(TRAINMOVER, 5, size=1 << 10)]
    assert list(speedups(by_place(rows), TRAINMOVER, GLOO).values()) == [3]


@pytest.mark.parametrize(("large_us", "met"), [(100, True), (101, False)])
def test_no_cell_may_be_slower_than_gloo(make_row: MakeRow, large_us: float, met: bool) -> None:
    rows = [make_row(GLOO, 17_000), make_row(TRAINMOVER, 1000)]
    rows += [make_row(GLOO, 100, size=LARGE), make_row(TRAINMOVER, large_us, size=LARGE)]
    found, text = only(rows)
    assert found is met
    assert "worst" in text
    assert "all_reduce of 64 MB over 8 ranks" in text


@pytest.mark.parametrize(("gloo_us", "met"), [(401, True), (399, False)])
def test_gloo_is_beaten_four_times_in_the_mean(make_row: MakeRow, gloo_us: float, met: bool) -> None:
    assert only([make_row(GLOO, gloo_us), make_row(TRAINMOVER, 100)])[0] is met


def test_over_tcp_nothing_is_asked(make_row: MakeRow) -> None:
    met, text = only([make_row(GLOO, 100), make_row(TRAINMOVER_TCP, 200)])
    assert met is None
    assert "0.50x" in text


@pytest.mark.parametrize(
    ("small_us", "met"),
    [(13, True), (13.1, False)],
    ids=["3 us apart is equal", "more is not"],
)
def test_a_cell_far_behind_open_mpi_is_a_miss(make_row: MakeRow, small_us: float, met: bool) -> None:
    rows = [make_row(OPENMPI, 10, size=2 << 10), make_row(DIRECT, small_us, size=2 << 10)]
    rows += [make_row(OPENMPI, 500), make_row(DIRECT, 100)]
    found, text = only(rows)
    assert found is met
    assert f"below 0.8x: {0 if met else 1} of 2 cells" in text


@pytest.mark.parametrize(("openmpi_us", "met"), [(1201, True), (1199, False)])
def test_open_mpi_is_beaten_in_the_mean(make_row: MakeRow, openmpi_us: float, met: bool) -> None:
    assert only([make_row(OPENMPI, openmpi_us), make_row(DIRECT, 1000)])[0] is met


@pytest.mark.parametrize(("us", "met"), [(99.9, True), (100, False)])
def test_the_small_all_reduce_has_its_limit(make_row: MakeRow, us: float, met: bool) -> None:
    assert only([make_row(TRAINMOVER, us, size=1 << 10)])[0] is met


def test_the_bound_is_the_known_one() -> None:
    for ranks, gbps in ((2, 13.5), (8, 3.4)):
        cell = Cell(op="all_reduce", ranks=ranks, bytes=LARGE)
        seconds = least_all_reduce_s(cell, RATES)
        row = Row(cell=cell, subject=DIRECT, median_us=seconds * 1e6, best_us=1)
        assert row.busbw_gbps == pytest.approx(gbps, rel=0.02)


@pytest.mark.parametrize(("times", "met"), [(1.99, True), (2.01, False)])
def test_the_large_all_reduce_reaches_half_the_bound(make_row: MakeRow, times: float, met: bool) -> None:
    least_us = least_all_reduce_s(Cell(op="all_reduce", ranks=8, bytes=LARGE), RATES) * 1e6
    found, text = only([make_row(DIRECT, least_us * times, size=LARGE)], {8: RATES})
    assert found is met
    assert "50%" in text
