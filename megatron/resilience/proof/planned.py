"""Runs a job untouched twice and migrated once, and compares the three. Used by `trainmover prove planned`.

All three trace their operations, so that a difference, which a second try might not show, is named when it shows.

The two untouched runs come first: a job that does not repeat itself to the bit gives no verdict on anything.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.resilience.agent.driven_run import RunError, driven_run
from megatron.resilience.proof.commands import ask, migrate
from megatron.resilience.proof.compare import Difference, Record, first_difference, last_iteration, read_records
from megatron.resilience.proof.evidence import gap_in_migrations, gap_in_records, last_try
from megatron.resilience.proof.operations import (
    OperationDifference,
    Trace,
    TracedOperation,
    first_operation,
    joined,
    read_trace,
)
from megatron.resilience.proof.saves import saving_to
from megatron.resilience.proof.schedule import Move, elastic_machines

_UNTOUCHED, _AGAIN, _MIGRATED = "untouched", "again", "migrated"
"""The three runs: names of their files."""


class Outcome(enum.StrEnum):
    """What a proof says."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NONE = "no verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSpec:
    """The job, and what is to happen to it."""

    script: tuple[str, ...]
    machines: int
    ranks_per_machine: int
    moves: tuple[Move, ...]
    folder: Path
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`why` is empty for an equal run. `incidents`: of each move the last try, as `trainmover incidents --json` tells
    it.
    """

    outcome: Outcome
    why: str = ""
    difference: Difference | None = None
    operation: OperationDifference | None = None
    """In which the runs first part, if their traces tell."""
    iterations: int = 0
    incidents: tuple[dict[str, Any], ...] = ()


def prove(spec: ProofSpec, say: Callable[[str], None]) -> Verdict:
    """See the module. Raises RunError when a job fails."""
    say("1 of 3: the job, untouched")
    first = _untouched(spec, _UNTOUCHED)
    gap = gap_in_records(first, spec.machines * spec.ranks_per_machine)
    if gap:
        return Verdict(outcome=Outcome.NONE, why=gap)
    say("2 of 3: the job again, untouched: does it repeat itself?")
    difference = first_difference(first, _untouched(spec, _AGAIN))
    if difference is not None:
        why = f"two untouched runs differ: {difference}; a job that does not repeat itself can prove nothing"
        return Verdict(outcome=Outcome.NONE, why=why, difference=difference)
    say(f"3 of 3: the job, migrated {len(spec.moves)} time{'s' * (len(spec.moves) != 1)}")
    records, incidents = migrated(spec, say)
    iterations = last_iteration(first)
    gap = gap_in_migrations(first, spec.moves, incidents)
    if gap:
        return Verdict(outcome=Outcome.NONE, why=gap, iterations=iterations, incidents=incidents)
    difference = first_difference(first, records)
    operation = None
    if difference is not None:
        operation = first_operation(*(_trace(spec, name) for name in (_UNTOUCHED, _AGAIN, _MIGRATED)))
    return Verdict(
        outcome=Outcome.EQUAL if difference is None else Outcome.DIFFERENT,
        why="" if difference is None else str(difference),
        difference=difference,
        operation=operation,
        iterations=iterations,
        incidents=incidents,
    )


def _untouched(spec: ProofSpec, name: str) -> list[Record]:
    metrics = spec.folder / f"{name}.jsonl"
    log, tracing = spec.folder / f"{name}.log", _tracing(spec, name)
    with driven_run(_flags(spec, name), _script(spec, name), log, tracing) as run:
        run.wait(time.monotonic() + spec.limit_s)
    return _records(metrics)


def migrated(spec: ProofSpec, say: Callable[[str], None]) -> tuple[list[Record], tuple[dict[str, Any], ...]]:
    """Runs the job with its moves: what it recorded, and the last incident of each move. Raises RunError."""
    metrics, resilience = spec.folder / f"{_MIGRATED}.jsonl", spec.folder / "resilience"
    flags = [*_flags(spec, _MIGRATED), "--resilience", "--resilience-dir", str(resilience)]
    flags += ["--elastic", str(elastic_machines(spec.moves))]
    deadline_s = time.monotonic() + spec.limit_s
    log, tracing = spec.folder / f"{_MIGRATED}.log", _tracing(spec, _MIGRATED)
    incidents: list[dict[str, Any]] = []
    known = 0
    with driven_run(flags, _script(spec, _MIGRATED), log, tracing) as run:
        for move in spec.moves:
            run.wait_for(partial(_reached, metrics, move.iteration), deadline_s, f"iteration {move.iteration}")
            say(migrate(run, resilience, move.slots, deadline_s))
            told = ask(resilience, "incidents")
            incidents += last_try(told, known)
            known = len(told)
        run.wait(deadline_s)
    return _records(metrics), tuple(incidents)


def _flags(spec: ProofSpec, name: str) -> list[str]:
    shape = ["--machines", str(spec.machines), "--ranks-per-machine", str(spec.ranks_per_machine)]
    return [*shape, "--log-dir", str(spec.folder / name)]


def _script(spec: ProofSpec, name: str) -> list[str]:
    script = saving_to(spec.script, spec.folder / f"{name}-checkpoints")
    return [*script, "--metrics-file", str(spec.folder / f"{name}.jsonl"), "--log-state-digest"]


def _tracing(spec: ProofSpec, name: str) -> dict[str, str]:
    """Environment of a run that traces its operations and counts its tensors."""
    folder = _trace_folder(spec, name)
    folder.mkdir(exist_ok=True)
    return {"TRAINMOVER_TRACE": f"{folder}/", "TRAINMOVER_COUNT_TENSORS": "1"}


def _trace_folder(spec: ProofSpec, name: str) -> Path:
    return spec.folder / f"{name}-operations"


def _trace(spec: ProofSpec, name: str) -> Trace:
    """What a run's ranks left: files named RANK.PROCESS."""
    traces: dict[int, list[list[TracedOperation]]] = {}
    for path in _trace_folder(spec, name).iterdir():
        with path.open(encoding="utf-8") as lines:
            traces.setdefault(int(path.stem), []).append(read_trace(lines))
    return {rank: joined(of_rank) for rank, of_rank in traces.items()}


def _records(metrics: Path) -> list[Record]:
    """Raises RunError for metrics that hold anything else."""
    try:
        return read_records(metrics.read_text(encoding="utf-8").splitlines()) if metrics.exists() else []
    except ValueError as error:
        raise RunError(f"{metrics}: {error}") from error


def _reached(metrics: Path, iteration: int) -> bool:
    """Whether `iteration` has ended. The last line may be half written."""
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    return last_iteration(read_records(text[: text.rfind("\n") + 1].splitlines())) >= iteration
