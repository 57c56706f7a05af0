"""What the figures say: ratios between libraries, and whether each aim is met. Pure; called by report.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.collectives.cells import (
    DIRECT,
    GLOO,
    OPENMPI,
    TRAINMOVER,
    TRAINMOVER_TCP,
    Cell,
    Row,
    Subject,
    cell_text,
)
from benchmarks.collectives.measure import Rates

GLOO_MEAN_MIN = 4.0
OPENMPI_MEAN_MIN, OPENMPI_CELL_MIN = 1.2, 0.8
EQUAL_US = 3.0
SMALL = Cell(op="all_reduce", ranks=8, bytes=1 << 10)
SMALL_US_MAX = 100.0
LARGE_BYTES, BOUND_SHARE_MIN = 64 << 20, 0.5

Figures = Mapping[tuple[Cell, Subject], Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One aim: the sentence with the figures, and whether it is met (None: nothing is asked)."""

    met: bool | None
    text: str


def by_place(rows: Iterable[Row]) -> Figures:
    """The rows, found by cell and subject."""
    return {(row.cell, row.subject): row for row in rows}


def speedups(figures: Figures, ours: Subject, theirs: Subject) -> dict[Cell, float]:
    """Their time over ours (2: we take half the time), for the cells where both were measured."""
    return {
        cell: figures[cell, theirs].median_us / row.median_us
        for (cell, subject), row in figures.items()
        if subject == ours and (cell, theirs) in figures
    }


def geometric_mean(values: Iterable[float]) -> float:
    """The mean that treats 2 and 1/2 alike. Raises ValueError for no value."""
    logarithms = [math.log(value) for value in values]
    if not logarithms:
        raise ValueError("found no value, expected one at least")
    return math.exp(sum(logarithms) / len(logarithms))


def least_all_reduce_s(cell: Cell, rates: Rates) -> float:
    """Bound of an all-reduce in shared memory: (N - 1) S bytes are added and as many copied, by the busy cores."""
    return (cell.ranks - 1) * cell.bytes * (1 / rates.reduce + 1 / rates.copy) / rates.cores


def verdicts(rows: Sequence[Row], rates: Mapping[int, Rates]) -> list[Verdict]:
    """All that can be said of `rows`; `rates` by number of ranks. An aim whose figures are missing is left out."""
    figures = by_place(rows)
    found = [
        _against_gloo(figures, TRAINMOVER, "trainmover"),
        _against_gloo(figures, TRAINMOVER_TCP, "trainmover over tcp"),
        _against_openmpi(figures),
        *(_small(figures, subject) for subject in (TRAINMOVER, DIRECT)),
        *(_large(figures, subject, rate, ranks) for subject in (TRAINMOVER, DIRECT) for ranks, rate in rates.items()),
    ]
    return [verdict for verdict in found if verdict is not None]


def _against_gloo(figures: Figures, ours: Subject, name: str) -> Verdict | None:
    ratios = speedups(figures, ours, GLOO)
    if not ratios:
        return None
    mean, worst = geometric_mean(ratios.values()), min(ratios, key=ratios.__getitem__)
    text = f"{name} against gloo: {mean:.2f}x in the geometric mean; worst {ratios[worst]:.2f}x, {cell_text(worst)}"
    if ours == TRAINMOVER_TCP:
        return Verdict(met=None, text=text)
    met = mean >= GLOO_MEAN_MIN and ratios[worst] >= 1
    return Verdict(met=met, text=f"{text} (aim: at least {GLOO_MEAN_MIN:g}x, and 1x in every cell)")


def _against_openmpi(figures: Figures) -> Verdict | None:
    ratios = speedups(figures, DIRECT, OPENMPI)
    if not ratios:
        return None
    mean, worst = geometric_mean(ratios.values()), min(ratios, key=ratios.__getitem__)
    text = f"trainmover-direct against Open MPI: {mean:.2f}x in the geometric mean; "
    text += f"worst {ratios[worst]:.2f}x, {cell_text(worst)}"
    below = [cell for cell in ratios if ratios[cell] < OPENMPI_CELL_MIN and not _equal(figures, cell)]
    text += f"; below {OPENMPI_CELL_MIN:g}x: {len(below)} of {len(ratios)} cells"
    text += f" (aim: at least {OPENMPI_MEAN_MIN:g}x, and no such cell; {EQUAL_US:g} us apart counts as equal)"
    return Verdict(met=mean >= OPENMPI_MEAN_MIN and not below, text=text)


def _equal(figures: Figures, cell: Cell) -> bool:
    return abs(figures[cell, DIRECT].median_us - figures[cell, OPENMPI].median_us) <= EQUAL_US


def _small(figures: Figures, ours: Subject) -> Verdict | None:
    row = figures.get((SMALL, ours))
    if row is None:
        return None
    text = f"{ours.library}: {cell_text(SMALL)} takes {row.median_us:.0f} us (aim: under {SMALL_US_MAX:g} us)"
    return Verdict(met=row.median_us < SMALL_US_MAX, text=text)


def _large(figures: Figures, ours: Subject, rates: Rates, ranks: int) -> Verdict | None:
    cell = Cell(op="all_reduce", ranks=ranks, bytes=LARGE_BYTES)
    row = figures.get((cell, ours))
    if row is None:
        return None
    share = least_all_reduce_s(cell, rates) * 1e6 / row.median_us
    text = f"{ours.library}: {cell_text(cell)} reaches {row.busbw_gbps:.2f} GB/s, {share:.0%} of the machine's bound"
    return Verdict(met=share >= BOUND_SHARE_MIN, text=f"{text} (aim: {BOUND_SHARE_MIN:.0%})")
