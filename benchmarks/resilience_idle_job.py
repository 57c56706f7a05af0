"""pretrain_gpt.py with resilience on in every second iteration, and what each iteration took written down.

Run by `resilience_idle_bench.py`, never by hand: `--cpu-times FOLDER` and `--train-iters N` are needed. In an iteration
without it a rank neither looks for commands at the top nor votes, as in a run without an agent; the line to its agent,
the communicator of votes and the arenas are there all the same. Rank 0 also looks at what its launcher, controller,
agents and spawners take meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from megatron.resilience.agent.process_tree import descendants, read_processes
from pretrain_gpt import main as train

PRELOAD = ("megatron.training.preload", "megatron.training.pretrain")
FLAG = "--cpu-times"
WARM_UP = 10
"""Iterations that do not count."""


def is_on(iteration: int) -> bool:
    """Whether resilience takes part in `iteration`."""
    return iteration % 2 == 0


def cpu_ticks(stat: str) -> int:
    """User and system time, of all threads there ever were, in the text of a /proc/PID/stat file."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def others_cpu_ms(driver_pid: int, spared: Iterable[int]) -> float:
    """CPU time so far of all that runs beneath the driver of this job, but for the trees of `spared`: the ranks."""
    ticks = 0
    for record in descendants(read_processes(), driver_pid, spared):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ticks += cpu_ticks(Path(f"/proc/{record.pid}/stat").read_text(encoding="utf-8", errors="replace"))
    return ticks * 1000 / os.sysconf("SC_CLK_TCK")


class Times:
    """Of one rank, with those of all processes that are no ranks if it is the first."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._marks_ns: list[tuple[int, int]] = []
        self._others_ms = 0.0
        (folder / f"rank-{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")

    def mark(self) -> None:
        """The top of an iteration, or the end of the last one."""
        if self._rank == 0 and len(self._marks_ns) == WARM_UP:  # all ranks have written their pid by now
            self._others_ms = self._others()
        self._marks_ns.append((time.process_time_ns(), time.monotonic_ns()))

    def write(self) -> None:
        """In ms, an item an iteration; processes that are no ranks since the warm-up."""
        others_ms = self._others() - self._others_ms if self._rank == 0 else 0.0
        cpu, wall = (
            [(later - earlier) / 1e6 for earlier, later in itertools.pairwise(clock)]
            for clock in zip(*self._marks_ns, strict=True)
        )
        text = json.dumps({"cpu_ms": cpu, "wall_ms": wall, "others_cpu_ms": others_ms})
        (self._folder / f"rank-{self._rank}.json").write_text(text, encoding="utf-8")

    def _others(self) -> float:
        ranks = [int(file.read_text(encoding="utf-8")) for file in self._folder.glob("rank-*.pid")]
        return others_cpu_ms(int((self._folder / "driver.pid").read_text(encoding="utf-8")), ranks)


def alternate(folder: Path, iterations: int) -> None:
    """From now on memberships of this process do so; times go to one file a rank in `folder`."""
    import torch

    from megatron.training import membership, switching
    from megatron.training.ending import Ending

    class Alternating(membership.SwitchedMembership):
        """Switched in every second iteration, fixed in the others."""

        times: Times

        def reach_boundary(self, iteration: int) -> None:
            if iteration == 1:
                self.times = Times(folder, torch.distributed.get_rank())
            self.times.mark()
            if is_on(iteration):
                super().reach_boundary(iteration)

        def vote(self, iteration: int, obstacles: tuple[str, ...]) -> None:
            if is_on(iteration):
                super().vote(iteration, obstacles)

        def ending(self, iteration: int) -> Ending:
            ending = super().ending(iteration) if is_on(iteration) else Ending.GOES_ON
            if iteration == iterations:
                self.times.mark()
                self.times.write()
            return ending

    switching.SwitchedMembership = Alternating  # type: ignore[attr-defined]


def main(argv: list[str]) -> int:
    """As pretrain_gpt.py's."""
    if FLAG in argv:
        place = argv.index(FLAG)
        folder = Path(argv[place + 1])
        argv = argv[:place] + argv[place + 2 :]
        last = len(argv) - 1 - argv[::-1].index("--train-iters")
        alternate(folder, int(argv[last + 1]))
    return train(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
