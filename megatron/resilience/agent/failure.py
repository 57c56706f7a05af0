"""Which failure of a job came first. Pure: reports go in, one of them comes out with the reason for choosing it.

When one rank dies, all its peers fail within milliseconds, and the order in which their ends are observed says little.
So failures are ranked by kind first and by time second: a rank that was killed by a signal we didn't send never
failed *because of* a peer; an exception of its own comes next; a lost connection is what the others see.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

SUMMARY_CHARACTERS_MAX = 500

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|socket closed|peer (closed|lost)|PeerLost"
    r"|CollectiveAborted|CollectiveTimeout|ConnectionResetError|ConnectionRefusedError|ConnectionAbortedError"
    r"|BrokenPipeError|DistNetworkError|DistStoreError|remote process exited|communicator was aborted"
    r"|recvValue failed|sendBytes failed|recvBytes failed|pair closure|timed out waiting \d+ ?ms"
    r"|timed out after \d+ ?ms|heartbeat",
    re.IGNORECASE,
)
_EXCEPTION_LINE = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")


# torch.distributed puts this before each line of an uncaught exception.
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")


class FailureClass(enum.IntEnum):
    """Kinds of failure; the lower, the more surely a cause and not a consequence."""

    KILLED = 0
    RAISED = 1
    LOST_PEER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """How one rank, or one machine's spawner, failed."""

    global_rank: int | None
    """None for the spawner (or agent) itself."""
    group_rank: int
    """Slot of the machine."""
    time_s: float
    """Monotonic clock: when it raised, or else when its end was seen."""
    exit_code: int | None = None
    """What it exited with; None when a signal killed it, or when it has raised and not ended yet."""
    signal_number: int | None = None
    """Signal that killed it and that we didn't send."""
    exception: str = ""
    """Last line of its traceback, or of its log."""
    details: str = ""
    """More of its message, for telling lost peers."""
    log_path: str = ""
    """Where its whole output is."""
    process: str = "spawner"
    """What failed, if it was no rank."""
    advice: str = ""
    """What it means, and what to do; empty where the failure says it itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The report to name first, its kind, and why it was chosen."""

    report: FailureReport
    failure_class: FailureClass
    reason: str


def classify(report: FailureReport) -> FailureClass:
    """Kind of `report`. An abort is judged by its last words: communication libraries abort when a peer is lost."""
    says_lost_peer = _LOST_PEER.search(f"{report.exception}\n{report.details}") is not None
    if report.signal_number is not None and report.signal_number != signal.SIGABRT:
        return FailureClass.KILLED
    if says_lost_peer:
        return FailureClass.LOST_PEER
    return FailureClass.KILLED if report.signal_number is not None else FailureClass.RAISED


def first_failure(reports: Iterable[FailureReport]) -> Verdict | None:
    """The likeliest cause among `reports`, in whatever order they came; None if there are none."""
    judged = sorted(
        ((classify(report), report.time_s, _order(report), report) for report in reports), key=lambda j: j[:3]
    )
    if not judged:
        return None
    failure_class, _, _, report = judged[0]
    if len(judged) == 1:
        reason = "the only failure"
    elif judged[1][0] == failure_class:
        reason = f"the earliest of {sum(1 for entry in judged if entry[0] == failure_class)} alike"
    else:
        reason = f"the others ({len(judged) - 1}) look like consequences"
    return Verdict(report=report, failure_class=failure_class, reason=reason)


def _order(report: FailureReport) -> int:
    return -1 if report.global_rank is None else report.global_rank


def describe(verdict: Verdict) -> list[str]:
    """The closing lines of a failed job: who failed and how, what to do, then where the rest can be read."""
    report = verdict.report
    who = f"the {report.process} of machine {report.group_rank}"
    if report.global_rank is not None:
        who = f"global rank {report.global_rank} on machine {report.group_rank}"
    if report.signal_number is not None:
        how = f"was killed by signal {report.signal_number} ({_signal_name(report.signal_number)})"
        if report.signal_number == signal.SIGABRT and report.exception:
            how += f": {report.exception}"
    elif report.exit_code in (None, EXIT_FAILURE) and report.exception:
        how = f"failed: {report.exception}"
    else:
        how = f"exited with code {report.exit_code}" + (f": {report.exception}" if report.exception else "")
    lines = [f"{who} {how}"]
    if report.advice:
        lines.append(report.advice)
    if report.log_path:
        lines.append(f"its whole output is in {report.log_path}")
    return lines


def cause(report: FailureReport) -> str:
    """What ended it, in a few words: a signal, or else what it said last."""
    if report.signal_number is None:
        return report.exception
    return f"killed by signal {report.signal_number} ({_signal_name(report.signal_number)})"


def last_words(lines: Iterable[str]) -> tuple[str, str]:
    """What the last lines of a log say of an end: (one line, more of it). Of several tracebacks the last counts."""
    tail = [_TORCH_PREFIX.sub("", line) for line in lines]
    starts = [index for index, line in enumerate(tail) if line.startswith("Traceback (most recent call last)")]
    if starts:
        after = tail[starts[-1] + 1 :]
        for index, line in enumerate(after):
            if _EXCEPTION_LINE.match(line):
                return shorten(line), "\n".join(after[index : index + 20])
    said = [line for line in tail if line.strip()]
    return (shorten(said[-1].strip()), "\n".join(said[-20:])) if said else ("", "")


def shorten(text: str) -> str:
    """First line of `text`, bounded."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= SUMMARY_CHARACTERS_MAX else line[:SUMMARY_CHARACTERS_MAX] + "..."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def exit_code(*, interrupted: bool, verdict: Verdict | None, has_trained: bool, all_ended_well: bool) -> int:
    """Exit code of the whole job. A usage error of the script counts as one only before the first iteration."""
    if interrupted:
        return EXIT_INTERRUPTED
    if verdict is not None and verdict.report.exit_code == EXIT_USAGE and not has_trained:
        return EXIT_USAGE
    return EXIT_OK if verdict is None and all_ended_well else EXIT_FAILURE
