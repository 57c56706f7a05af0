"""The interface that every way to replace a machine is measured by: a job, interrupted once, and what that cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job on this computer: what is trained, on how many machines, and where its files go."""

    script: str
    arguments: tuple[str, ...]
    machines: int
    ranks_per_machine: int
    folder: Path
    limit_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionCost:
    """Times in ms. `phases`, in order, add up to the time between the two iterations that downtime is made of."""

    downtime_ms: float
    median_iteration_ms: float
    iterations_lost: int
    phases: tuple[tuple[str, float], ...]


class Recovery(Protocol):
    """A way to go on when a machine has to be replaced."""

    @property
    def name(self) -> str:
        """For tables."""

    def interrupt(self, job: JobSpec, *, iteration: int) -> InterruptionCost:
        """Runs `job`, interrupts it after `iteration`, and lets it end. Raises RunError."""
