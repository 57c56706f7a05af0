"""How far training has come, read from the trainer's log line in Megatron-LM's format. Pure.

The launcher feeds it every line of the merged log and shows the result; the spawner only asks whether training began.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*(\d+)\s*\|")
_ELAPSED = re.compile(r"\|\s*elapsed time per iteration \(ms\):\s*([-+.\deEnainf]+)\s*\|")
_LOSS = re.compile(r"\|\s*lm loss:\s*([-+.\deEnainf]+)\s*\|")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLine:
    """One log line of the trainer."""

    iteration: int
    iterations: int
    iteration_ms: float | None
    loss: float | None


def parse_training_line(text: str) -> TrainingLine | None:
    """The figures of `text` if it is the trainer's log line, else None."""
    found = _ITERATION.search(text)
    if found is None:
        return None
    return TrainingLine(
        iteration=int(found[1]),
        iterations=int(found[2]),
        iteration_ms=_number(_ELAPSED, text),
        loss=_number(_LOSS, text),
    )


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is known of the whole run so far."""

    iteration: int = 0
    iterations: int = 0
    iteration_ms: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any iteration was logged."""
        return self.iterations > 0

    def after(self, line: TrainingLine) -> Progress:
        """Progress once `line` is known. Lines of earlier iterations, from slower ranks, change nothing."""
        if self.has_begun and line.iteration <= self.iteration:
            return self
        return replace(
            self,
            iteration=line.iteration,
            iterations=line.iterations,
            iteration_ms=line.iteration_ms if line.iteration_ms is not None else self.iteration_ms,
            first_loss=self.first_loss if self.first_loss is not None else line.loss,
            last_loss=line.loss if line.loss is not None else self.last_loss,
        )

    def eta_s(self) -> float | None:
        """Seconds to the last iteration at the present pace; None if the pace isn't known."""
        if self.iteration_ms is None:
            return None
        return max(0, self.iterations - self.iteration) * self.iteration_ms / 1000

    def describe(self) -> str:
        """`30/100 iterations, 312 ms each, ETA 0:22`."""
        text = f"{self.iteration}/{self.iterations} iterations"
        eta_s = self.eta_s()
        return text if eta_s is None else f"{text}, {self.iteration_ms:.0f} ms each, ETA {clock(eta_s)}"


def clock(seconds: float) -> str:
    """`0:22`, `12:03`, `1:02:03`. What isn't finite is `?`."""
    if not 0 <= seconds < float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def summarize(progress: Progress, *, wall_s: float, log_dir: str) -> str:
    """The closing line of a job: iterations, losses, time, and where the logs are."""
    parts = []
    if progress.has_begun:
        parts.append(f"{progress.iteration} of {progress.iterations} iterations")
    if progress.first_loss is not None and progress.last_loss is not None:
        parts.append(f"loss {progress.first_loss:.6g} -> {progress.last_loss:.6g}")
    parts += [f"{wall_s:.1f} s", f"logs in {log_dir}"]
    return ", ".join(parts)
