"""What replacing a machine costs (`make bench`): migrations there and back in a running job, and checkpoint restarts.

The demo's job on four machines of two ranks. Each round migrates in one run, then restarts from a checkpoint with
processes started anew, as a cluster does, and with processes forked; the rounds take turns, as the machine may be
shared: compare only figures of one call. Writes build/bench/switch.json (docs/schemas/switch.json describes it).
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import aims
from benchmarks.processes import nothing_left
from benchmarks.training_bench import JOB, ROOT, write
from megatron.resilience.agent.driven_run import RunError, driven_run
from megatron.resilience.baselines import timeline
from megatron.resilience.baselines.checkpoint_restart import CheckpointRestart
from megatron.resilience.baselines.interruption import JobSpec
from megatron.resilience.proof.commands import ask, migrate

RESULT = ROOT / "build" / "bench" / "switch.json"
MACHINES, RANKS = 4, 2
SLOTS = (3, 3, 0, 0)
"""That move one after the other, there and back: each machine that left is the one that joins next."""
ROUNDS = 2
SETTLE = 25
"""Iterations before a migration, and before a restart: a median is taken of twenty."""
RESTARTED = 40
"""Iterations of a job that is restarted on its way."""
LIMIT_S = 900.0
RATIO_MIN = 50.0
DOWNTIME_MS_MIN = 1.0
"""Less cannot be told from nothing, and is not divided by."""
LOOPBACK_BYTES = 256 << 20


@dataclass(slots=True, kw_only=True)
class Taken:
    """Everything measured so far, in ms."""

    iteration_ms: list[float] = field(default_factory=list)
    downtime_ms: list[float] = field(default_factory=list)
    lost_ms: list[float] = field(default_factory=list)
    bytes_moved: list[int] = field(default_factory=list)
    restart_ms: dict[str, list[float]] = field(default_factory=lambda: {"exec": [], "fork": []})

    def result(self) -> dict[str, Any]:
        """As the schema says."""
        restart = statistics.median(self.restart_ms["exec"])
        return {
            "median_iteration_ms": round(statistics.median(self.iteration_ms), 1),
            "downtime_ms": [round(value, 1) for value in self.downtime_ms],
            "lost_ms": [round(value, 1) for value in self.lost_ms],
            "restart_downtime_ms": round(restart, 1),
            "restart_warm_fork_downtime_ms": round(statistics.median(self.restart_ms["fork"]), 1),
            "ratio": round(restart / max(DOWNTIME_MS_MIN, statistics.median(self.downtime_ms)), 1),
        }

    def rank_bytes(self) -> float:
        """That one rank's state has: ranks of a machine hold parts of one size."""
        return statistics.median(self.bytes_moved) / RANKS


def arguments(iterations: int) -> tuple[str, ...]:
    """Of the trainer: the job of training_bench, for so many iterations."""
    return (*JOB.split(), "--train-iters", str(iterations))


def migrations(folder: Path, taken: Taken) -> None:
    """One run whose machines are replaced. Raises RunError."""
    metrics, resilience = folder / "metrics.jsonl", folder / "resilience"
    flags = ["--machines", str(MACHINES), "--ranks-per-machine", str(RANKS), "--log-dir", str(folder / "logs")]
    flags += ["--resilience", "--elastic", "1", "--resilience-dir", str(resilience)]
    script = [str(ROOT / "pretrain_gpt.py"), *arguments(1_000_000), "--metrics-file", str(metrics)]
    deadline_s = time.monotonic() + LIMIT_S
    with driven_run(flags, [*script, "--exit-signal-handler"], folder / "migrations.log") as run:
        for slot in SLOTS:
            settled = last_iteration(metrics) + SETTLE
            run.wait_for(partial(has_reached, metrics, settled), deadline_s, f"iteration {settled}")
            print(f"  {migrate(run, resilience, [slot], deadline_s)}", flush=True)
        incidents = ask(resilience, "incidents")
        run.process.terminate()
        run.wait(deadline_s)
    for incident in incidents:
        if incident["outcome"] != "done":
            raise RunError(f"found a migration that {incident['outcome']}: {incident['why']}; expected it to be done")
        if incident["downtime_ms"] is None:
            raise RunError("found a migration whose downtime no rank measured, expected it of those that stayed")
        taken.downtime_ms.append(incident["downtime_ms"])
        taken.lost_ms.append(incident["lost_ms"])
        taken.bytes_moved.append(incident["bytes_moved"])
    ends = ends_of(metrics)
    taken.iteration_ms.append(timeline.median_iteration_ms(ends, up_to=incidents[0]["boundary"] - 1))


def restart(folder: Path, start: str, taken: Taken) -> None:
    """One checkpoint restart. Raises RunError."""
    job = JobSpec(
        script=str(ROOT / "pretrain_gpt.py"),
        arguments=arguments(RESTARTED),
        machines=MACHINES,
        ranks_per_machine=RANKS,
        folder=folder,
        limit_s=LIMIT_S,
    )
    cost = CheckpointRestart(start=start).interrupt(job, iteration=SETTLE)
    parts = ", ".join(f"{name} {duration_ms:.0f} ms" for name, duration_ms in cost.phases)
    print(f"  restart ({start}): downtime {cost.downtime_ms:.0f} ms ({parts})", flush=True)
    taken.restart_ms[start].append(cost.downtime_ms)


def ends_of(metrics: Path) -> list[tuple[int, float]]:
    """When each iteration of a run ended."""
    return timeline.iteration_ends(metrics.read_text(encoding="utf-8").splitlines()) if metrics.exists() else []


def last_iteration(metrics: Path) -> int:
    """That has ended."""
    return max((iteration for iteration, _ in ends_of(metrics)), default=0)


def has_reached(metrics: Path, iteration: int) -> bool:
    """Whether it has ended."""
    return last_iteration(metrics) >= iteration


def loopback_bytes_per_ms(size: int = LOOPBACK_BYTES) -> float:
    """Speed of one TCP connection to this computer itself."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            left, into = size, bytearray(1 << 20)
            giver = threading.Thread(target=partial(sender.sendall, bytes(size)), daemon=True)
            started_s = time.perf_counter()
            giver.start()
            while left > 0:
                left -= receiver.recv_into(into)
            elapsed_s = time.perf_counter() - started_s
            giver.join()
    return size / (elapsed_s * 1e3)


def judge(result: Mapping[str, Any], rank_bytes: float, bytes_per_ms: float) -> tuple[dict[str, str], list[str]]:
    """Verdicts as the schema says, and a line for each.

    A switch may cost an iteration and the time that one rank's state takes over one connection: ranks of a machine
    give their state at the same time, each to its own successor. The sum of their bytes would allow for one after the
    other. The median is judged, and the worst.
    """
    bound_ms = result["median_iteration_ms"] + rank_bytes / bytes_per_ms
    bound = (
        f"(aim: at most {bound_ms:.1f}, an iteration and {rank_bytes / 1e6:.1f} MB at {bytes_per_ms / 1e6:.2f} GB/s)"
    )
    median_ms, worst_ms = statistics.median(result["downtime_ms"]), max(result["downtime_ms"])
    judged = {
        "ratio": (
            result["ratio"] >= RATIO_MIN,
            f"restart / downtime = {result['ratio']:.1f} (aim: at least {RATIO_MIN:g})",
        ),
        "median": (median_ms <= bound_ms, f"median downtime {median_ms:.1f} ms {bound}"),
        "worst": (worst_ms <= bound_ms, f"worst downtime {worst_ms:.1f} ms {bound}"),
    }
    verdicts = {name: aims.verdict(met) for name, (met, _) in judged.items()}
    return verdicts, [aims.line(met, text) for met, text in judged.values()]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--output", type=Path, default=RESULT)
    aims.add_strict(parser)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measures, writes and prints. 0: measured, and with --strict every aim met; 1: a run failed; 2: wrong flags."""
    flags = parse(words)
    taken = Taken()
    try:
        with nothing_left() as folder:
            for number in range(1 if flags.quick else ROUNDS):
                print(f"round {number + 1}", flush=True)
                for name in ("migrations", "exec", "fork"):
                    place = folder / f"{number}-{name}"
                    place.mkdir()
                    if name == "migrations":
                        migrations(place, taken)
                    else:
                        restart(place, name, taken)
    except RunError as error:
        print(f"switch_bench: {error}", file=sys.stderr)
        return 1
    result = taken.result()
    print(*(f"{name:30s} {value}" for name, value in result.items()), sep="\n")
    verdicts, lines = judge(result, taken.rank_bytes(), loopback_bytes_per_ms())
    print(*lines, sep="\n")
    write({**result, "verdicts": verdicts}, flags.output)
    print(f"written to {flags.output}")
    return aims.exit_code(lines, strict=flags.strict)


if __name__ == "__main__":
    sys.exit(main())
