"""Checkpoint restart, as a user of Megatron does it today: save, stop, launch again, load.

Nothing in it waits longer than it must: the signal goes out as soon as the iteration is recorded, and the launch
follows the end of the stopped job at once. `start` "exec" is what a cluster does, a new Python for each rank; "fork"
spares the imports of all ranks but one a machine.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.resilience.agent.driven_run import driven_run
from megatron.resilience.baselines import timeline
from megatron.resilience.baselines.interruption import InterruptionCost, JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRestart:
    """See the module."""

    start: str = "exec"

    @property
    def name(self) -> str:
        """For tables."""
        return f"checkpoint restart ({self.start})"

    def interrupt(self, job: JobSpec, *, iteration: int) -> InterruptionCost:
        """See Recovery; raises RunError. The job's arguments must not name --save, --load or --metrics-file."""
        stopped, resumed = job.folder / "stopped.jsonl", job.folder / "resumed.jsonl"
        saving = ("--save", str(job.folder / "checkpoints"), "--exit-signal-handler")
        loading = (*saving, "--load", str(job.folder / "checkpoints"))
        deadline_s = time.monotonic() + job.limit_s
        with driven_run(self._flags(job, stopped), _script(job, stopped, saving), stopped.with_suffix(".log")) as first:
            first.wait_for(lambda: _has_ended(stopped, iteration), deadline_s, f"iteration {iteration}")
            first.process.send_signal(signal.SIGTERM)
            first.wait(deadline_s)
        stopped_s = time.time()
        with driven_run(
            self._flags(job, resumed), _script(job, resumed, loading), resumed.with_suffix(".log")
        ) as second:
            second.wait_for(lambda: bool(_ends(resumed)), deadline_s, "the first iteration after the restart")
            second.wait(deadline_s)
        return _cost(_ends(stopped), _ends(resumed), stopped_s, second.first_line_s(" loaded "))

    def _flags(self, job: JobSpec, metrics: Path) -> list[str]:
        shape = ["--machines", str(job.machines), "--ranks-per-machine", str(job.ranks_per_machine)]
        return [*shape, "--start", self.start, "--log-dir", str(metrics.with_suffix(""))]


def _script(job: JobSpec, metrics: Path, flags: tuple[str, ...]) -> list[str]:
    return [job.script, *job.arguments, *flags, "--metrics-file", str(metrics)]


def _ends(metrics: Path) -> list[tuple[int, float]]:
    return timeline.iteration_ends(metrics.read_text().splitlines()) if metrics.exists() else []


def _has_ended(metrics: Path, iteration: int) -> bool:
    return any(ended >= iteration for ended, _ in _ends(metrics))


def _cost(
    before: list[tuple[int, float]], after: list[tuple[int, float]], stopped_s: float, loaded_s: float | None
) -> InterruptionCost:
    gap_ms = timeline.gap_ms(before, after)
    median_ms = timeline.median_iteration_ms(before, up_to=before[-1][0])
    started_s = before[-1][1]
    marks = {"save and stop": (stopped_s - started_s) * 1e3}
    if loaded_s is not None:
        marks["launch, initialise and load"] = (loaded_s - started_s) * 1e3
    marks["first iteration"] = gap_ms
    return InterruptionCost(
        downtime_ms=gap_ms - median_ms,
        median_iteration_ms=median_ms,
        iterations_lost=max(0, before[-1][0] - after[0][0] + 1),
        phases=timeline.split(gap_ms, marks),
    )
