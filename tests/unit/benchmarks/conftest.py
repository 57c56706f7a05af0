"""Figures for the tests of the benchmarks' pure parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.collectives.cells import Cell, Row, Subject

MakeRow = Callable[..., Row]


@pytest.fixture
def make_row() -> MakeRow:
    def make(subject: Subject, median_us: float, *, op: str = "all_reduce", ranks: int = 8, size: int = 1 << 20) -> Row:
        cell = Cell(op=op, ranks=ranks, bytes=size)
        return Row(cell=cell, subject=subject, median_us=median_us, best_us=median_us * 0.9)

    return make
