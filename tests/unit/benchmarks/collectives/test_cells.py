"""Bus bandwidth as nccl-tests counts it, and how often a cell is measured."""

from __future__ import annotations

import pytest

from benchmarks.collectives.cells import (
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    LIBRARIES,
    OPS,
    SUBJECTS,
    Cell,
    Row,
    bus_bandwidth_gbps,
    cell_text,
    iterations_for,
    size_text,
)


@pytest.mark.parametrize(
    ("op", "factor"),
    [("all_reduce", 1.75), ("reduce_scatter", 0.875), ("all_gather", 0.875), ("broadcast", 1), ("send_recv", 1)],
)
def test_bus_bandwidth_counts_what_a_rings_link_carries(op: str, factor: float) -> None:
    cell = Cell(op=op, ranks=8, bytes=10**9)
    assert bus_bandwidth_gbps(cell, 0.5) == pytest.approx(2 * factor)
    row = Row(cell=cell, subject=SUBJECTS[0], median_us=500_000, best_us=1)
    assert row.busbw_gbps == pytest.approx(2 * factor), "of the median, not of the best"


def test_two_ranks_bus_bandwidth_of_an_all_reduce_is_bytes_over_time() -> None:
    assert bus_bandwidth_gbps(Cell(op="all_reduce", ranks=2, bytes=10**9), 1) == pytest.approx(1)


def test_iterations_fill_the_budget_within_bounds() -> None:
    assert iterations_for(0.01, 0.2) == 20
    assert iterations_for(5.0, 0.2) == ITERATIONS_MIN
    assert iterations_for(0.0, 0.2) == ITERATIONS_MAX


def test_sizes_read_well() -> None:
    assert [size_text(size) for size in (512, 1 << 10, 64 << 10, 1 << 20, 3 << 19)] == [
        "0.5 KB",
        "1 KB",
        "64 KB",
        "1 MB",
        "1536 KB",
    ]
    assert cell_text(Cell(op=OPS[0], ranks=2, bytes=1 << 10)) == "all_reduce of 1 KB over 2 ranks"


def test_every_library_is_measured() -> None:
    assert {subject.library for subject in SUBJECTS} == set(LIBRARIES)
    assert [subject.library for subject in SUBJECTS if subject.transport == "tcp"] == ["trainmover", "gloo"]
