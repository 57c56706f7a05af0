"""What a spawner, or the agent round it, tells the launcher: JSON, one event a line, over the descriptor given by
--report-fd.

Times are CLOCK_MONOTONIC seconds, which all processes of one computer share.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from megatron.resilience.agent.failure import FailureReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """A rank's process exists."""

    global_rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """A rank has raised, or ended badly; it may still be on its way out."""

    failure: FailureReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank has ended and its output is complete."""

    global_rank: int
    status: int
    """Exit code, or minus the signal number."""
    failure: FailureReport | None
    """None if it exited with 0, or by a signal that we sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTaken:
    """An agent's machine holds a slot from now on: its ranks are the job's."""

    group_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReleased:
    """An agent's machine holds that slot no more: what its ranks do is no matter of the job's."""

    group_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStopped:
    """The controller has declared the job over."""

    why: str


AgentEvent = RankStarted | RankFailed | RankExited | SlotTaken | SlotReleased | JobStopped

_PLAIN: dict[str, type[RankStarted | SlotTaken | SlotReleased | JobStopped]] = {
    "RankStarted": RankStarted,
    "SlotTaken": SlotTaken,
    "SlotReleased": SlotReleased,
    "JobStopped": JobStopped,
}


def encode(event: AgentEvent) -> bytes:
    """One line."""
    return json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)}).encode() + b"\n"


def decode(line: str) -> AgentEvent:
    """The event of one line. Raises ValueError for anything else, an unknown event included."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"found {line[:80]!r}, expected one JSON object")
    name = fields.pop("event", None)
    failure = fields.pop("failure", None)
    report = FailureReport(**failure) if failure is not None else None
    if name in _PLAIN:
        return _PLAIN[name](**fields)
    if name == "RankFailed" and report is not None:
        return RankFailed(failure=report)
    if name == "RankExited":
        return RankExited(failure=report, **fields)
    raise ValueError(f"found event {name!r}, expected RankFailed, RankExited, {', '.join(_PLAIN)}")
