"""`trainmover prove planned`: shows on one computer that migrating machines of a job changes no bit of it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.resilience.agent.driven_run import RunError, RunRefusedError
from megatron.resilience.agent.failure import EXIT_FAILURE, EXIT_OK, EXIT_USAGE
from megatron.resilience.agent.spawner import split_at_script
from megatron.resilience.cli.usage import FlagParser, UsageError
from megatron.resilience.proof.planned import Outcome, ProofSpec, Verdict, prove
from megatron.resilience.proof.schedule import parse_moves
from megatron.resilience.proof.window import window_flags
from megatron.resilience.protocol.incidents import milliseconds

_KINDS = ("planned",)


def main(argv: Sequence[str]) -> int:
    """Proves. 0: equal in every bit; 1: different, or no verdict; 2: the job refuses its command line.

    Raises UsageError.
    """
    own, script = split_at_script(argv)
    options = _parser().parse_flags(own)
    if options.kind not in _KINDS:
        raise UsageError(
            f"found {options.kind!r}, expected {' or '.join(_KINDS)}; run `trainmover prove planned --help`"
        )
    if not script:
        raise UsageError("found no script, expected one after `--`; run `trainmover prove planned -- SCRIPT ARGS`")
    for flag, value in (("--machines", options.machines), ("--ranks-per-machine", options.ranks_per_machine)):
        if value < 1:
            raise UsageError(f"found {flag} {value}, expected at least 1")
    if not 0 < options.limit < float("inf"):
        raise UsageError(f"found --limit {options.limit:g}, expected seconds, more than 0")
    for word in ("--metrics-file", "--log-state-digest"):
        if any(given == word or given.startswith(f"{word}=") for given in script):
            raise UsageError(f"found {word} in the script's arguments, which the proof sets itself; leave it out")
    try:
        moves = parse_moves(options.migrate or ["10:0"], machines=options.machines)
        script = [*script, *window_flags(script, options.window)]
    except ValueError as error:
        raise UsageError(str(error)) from error
    folder = Path(tempfile.mkdtemp(prefix="trainmover-proof-")) if options.folder is None else _made(options.folder)
    spec = ProofSpec(
        script=tuple(script),
        machines=options.machines,
        ranks_per_machine=options.ranks_per_machine,
        moves=moves,
        folder=folder,
        limit_s=options.limit,
    )
    try:
        verdict = prove(spec, _say)
    except RunRefusedError as error:
        _remove(folder, is_ours=options.folder is None)
        print(error.line, file=sys.stderr, flush=True)
        return EXIT_USAGE
    except RunError as error:
        verdict = Verdict(outcome=Outcome.NONE, why=str(error))
    if verdict.outcome is Outcome.EQUAL and options.folder is None:
        _remove(folder, is_ours=True)
    print(json.dumps(as_json(verdict)) if options.json else text(verdict, folder), flush=True)
    return EXIT_OK if verdict.outcome is Outcome.EQUAL else EXIT_FAILURE


def _made(folder: Path) -> Path:
    """An empty folder. Raises UsageError: what an earlier proof left there would be read as this one's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_used = any(folder.iterdir())
    except OSError as error:
        raise UsageError(
            f"found --folder {folder} not usable ({error.strerror}), expected one to write to; name another"
        ) from error
    if is_used:
        raise UsageError(f"found files in --folder {folder}, expected an empty folder or none yet; name another")
    return folder


def _remove(folder: Path, *, is_ours: bool) -> None:
    """All of it; of a folder that the user named, what is in it: that is the proof's too."""
    for path in [folder] if is_ours else list(folder.iterdir()):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="trainmover prove",
        usage="trainmover prove planned [flags] -- SCRIPT ARGS...",
        description="Runs a job untouched twice and migrated once, on this computer, and compares every bit.",
        allow_abbrev=False,
    )
    parser.add_argument("kind", help="planned: machines are replaced on purpose")
    parser.add_argument("--machines", type=int, default=2, metavar="M", help="machines of the job (default 2)")
    parser.add_argument("--ranks-per-machine", type=int, default=1, metavar="L", help="ranks on each (default 1)")
    parser.add_argument(
        "--migrate",
        action="append",
        metavar="ITERATION:SLOT[,SLOT]",
        help="which slots move once that iteration has ended; again for more (default 10:0)",
    )
    parser.add_argument("--window", type=int, metavar="N", help="only N iterations, from the checkpoint of --load")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS", help="for each run (default 3600)")
    parser.add_argument(
        "--folder", type=Path, help="empty; keep logs, metrics and saves there (default: only if not equal)"
    )
    parser.add_argument("--json", action="store_true", help="the verdict as one JSON object")
    return parser


def as_json(verdict: Verdict) -> dict[str, object]:
    """Plain values."""
    difference = verdict.difference
    return {
        "verdict": verdict.outcome.value,
        "why": verdict.why,
        "iterations": verdict.iterations,
        "first_difference": None
        if difference is None
        else {
            "iteration": difference.iteration,
            "what": difference.what,
            "expected": difference.expected,
            "found": difference.found,
        },
        "first_operation": None if verdict.operation is None else dataclasses.asdict(verdict.operation),
        "incidents": list(verdict.incidents),
    }


def text(verdict: Verdict, folder: Path) -> str:
    """For people."""
    if verdict.outcome is Outcome.EQUAL:
        moved = ", ".join(
            f"slot {'+'.join(map(str, incident['slots']))} at iteration {incident['boundary']} "
            f"(downtime {milliseconds(incident['downtime_ms'])})"
            for incident in verdict.incidents
        )
        return (
            f"EQUAL: losses, gradient norms and the state of every rank over {verdict.iterations} iterations, to the "
            f"last bit. Moved: {moved}."
        )
    kept = f"Logs and metrics: {folder}"
    if verdict.outcome is Outcome.DIFFERENT:
        operation = "" if verdict.operation is None else f" The first operation that differs: {verdict.operation}."
        return f"DIFFERENT: {verdict.why}.{operation} {kept}"
    return f"NO VERDICT: {verdict.why}. {kept}"


def _say(line: str) -> None:
    print(f"trainmover: {line}", file=sys.stderr, flush=True)
