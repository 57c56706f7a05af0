"""pretrain_gpt.py with resilience on in every second iteration, and the CPU time of each iteration written down.

Run by `resilience_idle_bench.py`, never by hand: `--cpu-times FOLDER` and `--train-iters N` are needed. In an iteration
without it a rank neither looks for commands at the top nor votes, as in a run without an agent.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

from pretrain_gpt import main as train

PRELOAD = ("megatron.training.preload", "megatron.training.pretrain")
FLAG = "--cpu-times"


def is_on(iteration: int) -> bool:
    """Whether resilience takes part in `iteration`."""
    return iteration % 2 == 0


def alternate(folder: Path, iterations: int) -> None:
    """From now on memberships of this process do so; times go to one file a rank in `folder`, in ms."""
    import torch

    from megatron.training import membership, switching
    from megatron.training.ending import Ending

    class Alternating(membership.SwitchedMembership):
        """Switched in every second iteration, fixed in the others."""

        marks_ns: list[int]

        def reach_boundary(self, iteration: int) -> None:
            if iteration == 1:
                self.marks_ns = []
            self.marks_ns.append(time.process_time_ns())
            if is_on(iteration):
                super().reach_boundary(iteration)

        def vote(self, iteration: int, obstacles: tuple[str, ...]) -> None:
            if is_on(iteration):
                super().vote(iteration, obstacles)

        def ending(self, iteration: int) -> Ending:
            ending = super().ending(iteration) if is_on(iteration) else Ending.GOES_ON
            if iteration == iterations:
                self._write([*self.marks_ns, time.process_time_ns()])
            return ending

        def _write(self, marks_ns: list[int]) -> None:
            durations = [(later - earlier) / 1e6 for earlier, later in itertools.pairwise(marks_ns)]
            rank = torch.distributed.get_rank()
            (folder / f"rank-{rank}.json").write_text(json.dumps(durations), encoding="utf-8")

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
