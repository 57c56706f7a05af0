"""pretrain_gpt.py for proofs about switches: short jobs that are long enough for a switch, and one that gets it wrong.

`--wait-for-switch N`, once for each switch: in the run that is migrated, ranks wait at the top of iteration N or a
later one until the machines that join are built; without it they train on meanwhile. `--harm BIT`: a rank that joins
gets this bit of the first number of its last arena wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain_gpt import main

PRELOAD = ("megatron.training.preload", "megatron.training.pretrain")
LIMIT_S = 200.0
POLL_S = 0.02


def preflight(argv: list[str]) -> int:
    """As pretrain_gpt.py's. The launcher looks for this name."""
    return run([*argv])


class Patience:
    """Waits for switches, as the controller's event log tells of them."""

    def __init__(self, iterations: list[int], events: Path) -> None:
        self._iterations = sorted(iterations)
        self._events = events

    def wait(self, iteration: int) -> None:
        """Raises TimeoutError."""
        deadline_s = time.monotonic() + LIMIT_S
        while self._is_early(sum(first <= iteration for first in self._iterations)):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"iteration {iteration}: no switch has been prepared within {LIMIT_S:g} s")
            time.sleep(POLL_S)

    def _is_early(self, expected: int) -> bool:
        """Whether fewer switches than `expected` have begun to prepare, and none of them needs iterations now."""
        text = self._events.read_text(encoding="utf-8")
        records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        prepared = {record["id"] for record in records if record["name"] == "prepare leaver"}
        ended = {record["id"] for record in records if record["kind"] == "END"}
        return len(prepared) < expected and prepared <= ended


def be_patient(wait: Callable[[int], None]) -> None:
    """Ranks of this process call `wait` with the number of the iteration at the top of the loop."""
    from megatron.training.membership import SwitchedMembership

    reach_boundary = SwitchedMembership.reach_boundary

    def patient(self: SwitchedMembership, iteration: int) -> None:
        reach_boundary(self, iteration)
        wait(iteration)

    SwitchedMembership.reach_boundary = patient  # type: ignore[method-assign]


def harm_joiners(bit: int) -> None:
    """A rank that takes another's place has that bit wrong in the last of its arenas."""
    from megatron.resilience.worker.rank_worker import RankWorker

    join = RankWorker.join

    def harmed(self: RankWorker, facts: Any) -> None:
        join(self, facts)
        memory = self._inventory.memory()[-1]
        memory[bit // 8] ^= 1 << bit % 8

    RankWorker.join = harmed  # type: ignore[method-assign]


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--wait-for-switch", type=int, action="append", default=[])
    parser.add_argument("--harm", type=int)
    parser.add_argument("--metrics-file", type=Path)
    own, script = parser.parse_known_args(argv)
    if own.metrics_file is not None:
        script += ["--metrics-file", str(own.metrics_file)]
    if own.metrics_file is not None and own.metrics_file.stem == "migrated" and "--preflight-only" not in script:
        if own.wait_for_switch:
            be_patient(Patience(own.wait_for_switch, own.metrics_file.parent / "resilience" / "events.jsonl").wait)
        if own.harm is not None:
            harm_joiners(own.harm)
    return main(script)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
