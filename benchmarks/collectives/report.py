"""Shows and writes the figures: tables, verdicts, and build/bench/collectives.json (docs/schemas/collectives.json).

Called by collectives_bench.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.collectives.cells import (
    DIRECT,
    GLOO,
    OPENMPI,
    TRAINMOVER,
    TRAINMOVER_TCP,
    Cell,
    Row,
    Subject,
    size_text,
)
from benchmarks.collectives.measure import Rates
from benchmarks.collectives.verdict import Figures, by_place, verdicts

WIDTH = 120


def records(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows as they are written. Those over tcp come first: who keys by library keeps the faster one, the last."""
    return [
        {
            "op": row.cell.op,
            "ranks": row.cell.ranks,
            "bytes": row.cell.bytes,
            "library": row.subject.library,
            "median_us": round(row.median_us, 2),
            "best_us": round(row.best_us, 2),
            "busbw_gbps": float(f"{row.busbw_gbps:.4g}"),
            "transport": row.subject.transport,
        }
        for row in sorted(rows, key=lambda row: row.subject.transport != "tcp")
    ]


def write(rows: Iterable[Row], path: Path) -> None:
    """Writes `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(records(rows), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def show(rows: Sequence[Row], rates: Mapping[int, Rates], console: Console) -> None:
    """Prints the tables of what was measured, the machine's own rates, and a line for each aim."""
    figures = by_place(rows)
    has = {row.subject for row in rows}
    console.print(machine_table(figures))
    if TRAINMOVER_TCP in has:
        console.print(tcp_table(figures))
    for ranks, rate in rates.items():
        console.print(
            f"Bound over {ranks} ranks: {rate.cores} core(s) at once, each y += x at {rate.reduce / 1e9:.1f} GB/s and "
            f"y = x at {rate.copy / 1e9:.1f} GB/s (numpy, vectors of 64 MB at most)",
            highlight=False,
        )
    for verdict in verdicts(rows, rates):
        mark = {True: "[green]met   [/]", False: "[red]MISSED[/]", None: "      "}[verdict.met]
        console.print(f"{mark} {verdict.text}", highlight=False, soft_wrap=True)


def machine_table(figures: Figures) -> Table:
    """One machine, through its memory: microseconds, bus bandwidth, and how many times faster ours is."""
    table = _table("One machine: median us of the slowest rank (bus bandwidth in GB/s)")
    for name in ("gloo", "trainmover", "x gloo", "direct", "Open MPI", "x MPI"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in _cells(figures):
        table.add_row(
            *_place(cell),
            _time(figures, cell, GLOO),
            _time(figures, cell, TRAINMOVER),
            _ratio(figures, cell, TRAINMOVER, GLOO),
            _time(figures, cell, DIRECT),
            _time(figures, cell, OPENMPI),
            _ratio(figures, cell, DIRECT, OPENMPI),
        )
    return table


def tcp_table(figures: Figures) -> Table:
    """TCP on loopback, as between machines."""
    table = _table("TCP on loopback: median us of the slowest rank (bus bandwidth in GB/s)")
    for name in ("gloo", "trainmover", "x gloo"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in _cells(figures):
        ours = _time(figures, cell, TRAINMOVER_TCP)
        ratio = _ratio(figures, cell, TRAINMOVER_TCP, GLOO)
        table.add_row(*_place(cell), _time(figures, cell, GLOO), ours, ratio)
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("operation", no_wrap=True)
    for name in ("ranks", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(figures: Figures) -> list[Cell]:
    return list(dict.fromkeys(cell for cell, _ in figures))


def _place(cell: Cell) -> tuple[str, str, str]:
    return cell.op, str(cell.ranks), size_text(cell.bytes)


def _time(figures: Figures, cell: Cell, subject: Subject) -> str:
    row = figures.get((cell, subject))
    return "-" if row is None else f"{row.median_us:.{1 if row.median_us < 100 else 0}f} ({row.busbw_gbps:.2f})"


def _ratio(figures: Figures, cell: Cell, ours: Subject, theirs: Subject) -> str:
    own, other = figures.get((cell, ours)), figures.get((cell, theirs))
    if own is None or other is None:
        return "-"
    ratio = other.median_us / own.median_us
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}[/]"
