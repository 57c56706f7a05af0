"""What is measured: operations, sizes, libraries, and the row a measurement becomes. Pure; used by all beside it."""

from __future__ import annotations

from dataclasses import dataclass

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send_recv")
RANKS = (2, 4, 8)
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
LIBRARIES = ("gloo", "trainmover", "trainmover-direct", "openmpi")
ITERATIONS_MIN, ITERATIONS_MAX = 3, 61


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One place of the table. `bytes` is the size of the full vector, as NCCL counts it; send_recv: of one message."""

    op: str
    ranks: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A library over what carries its bytes: "shm" (the machine's memory) or "tcp" (loopback)."""

    library: str
    transport: str


GLOO = Subject(library="gloo", transport="tcp")
TRAINMOVER = Subject(library="trainmover", transport="shm")
DIRECT = Subject(library="trainmover-direct", transport="shm")
OPENMPI = Subject(library="openmpi", transport="shm")
TRAINMOVER_TCP = Subject(library="trainmover", transport="tcp")
# In the order in which a round takes them: those compared with each other stand side by side.
SUBJECTS = (TRAINMOVER_TCP, GLOO, TRAINMOVER, DIRECT, OPENMPI)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of a subject in a cell. Microseconds are the slowest rank's: median and least over the rounds' medians."""

    cell: Cell
    subject: Subject
    median_us: float
    best_us: float

    @property
    def busbw_gbps(self) -> float:
        """Bus bandwidth of the median, in GB/s (10^9 bytes)."""
        return bus_bandwidth_gbps(self.cell, self.median_us / 1e6)


def bus_bandwidth_gbps(cell: Cell, seconds: float) -> float:
    """Bytes a second over the busiest link of a ring, as nccl-tests defines it, in GB/s: comparable between ranks."""
    share = (cell.ranks - 1) / cell.ranks
    factor = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share}.get(cell.op, 1.0)
    return factor * cell.bytes / seconds / 1e9


def iterations_for(seconds_each: float, budget_s: float) -> int:
    """How often an operation is measured in one round, so that the round takes about `budget_s`."""
    return max(ITERATIONS_MIN, min(ITERATIONS_MAX, int(budget_s / max(seconds_each, 1e-9))))


def size_text(size: int) -> str:
    """1024 -> "1 KB"."""
    return f"{size >> 20} MB" if size >= 1 << 20 and size % (1 << 20) == 0 else f"{size / 1024:g} KB"


def cell_text(cell: Cell) -> str:
    """The cell in a sentence."""
    return f"{cell.op} of {size_text(cell.bytes)} over {cell.ranks} ranks"
