"""Incidents: what one interruption was, how long its phases took, what it cost. Kept by the controller's core.

A phase is overlapped when training went on during it, which it does but for the hand-over and the first iteration.
Downtime and lost time come from the ranks, never clamped: see `Measured` in messages.py for who measures what.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

HAND_OVER, FIRST_ITERATION = "hand over", "first iteration"
"""The phases in which training stops."""
AWAY = "controller away"
"""A phase's duration has this in it: what happened meanwhile was heard afterwards."""


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of an incident, in ms of the controller's clock, from when it heard of it."""

    name: str
    start_ms: float
    duration_ms: float
    overlapped: bool


class Incident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One interruption, from its first sign to the first iteration trained after it."""

    incident_id: str
    kind: str
    outcome: str
    """`done`, `aborted`, `failed`, or the phase it is in."""
    why: str
    leavers: tuple[str, ...]
    joiners: tuple[str, ...]
    reasons: tuple[str, ...]
    """Why each joiner was chosen."""
    slots: tuple[int, ...]
    generation: int
    boundary: int = -1
    """Iteration at whose top the switch happened; -1 if there was none."""
    phases: tuple[Phase, ...] = ()
    downtime_ms: float | None = None
    """None, as `lost_ms`: no rank could measure it."""
    lost_ms: float | None = None
    iterations_lost: int = 0
    links_kept: int = 0
    links_replaced: int = 0
    bytes_moved: int = 0
    memory_before_bytes: int = 0
    memory_after_bytes: int = 0
    memory_change_bytes: int = 0
    """After less before, of the stayer where it changed most."""
    stayers_compared: int = 0
    """Ranks that measured their memory before and after."""
    peaks_bytes: dict[int, tuple[int, int]] = {}
    """Global rank that moved -> the most memory that its leaver and its joiner have held."""
    ranks_measured: int = 0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured."""

    downtime_ms: float | None
    lost_ms: float | None
    links_kept: int
    links_replaced: int
    bytes_moved: int
    memory_before_bytes: int
    memory_after_bytes: int
    global_rank: int = -1
    peaks_bytes: tuple[int, int] | None = None
    """Of leaver and joiner, if the rank moved."""


def add_mark(marks: list[tuple[str, float]], phase: str, time_ms: float) -> None:
    """A phase begins, or (AWAY) the present one has an absence of the controller in it."""
    name, began_ms = marks[-1]
    if phase != AWAY:
        marks.append((phase, time_ms))
    elif not name.endswith(AWAY):
        marks[-1] = f"{name}, {AWAY}", began_ms


def phases_of(marks: list[tuple[str, float]], end_ms: float) -> tuple[Phase, ...]:
    """`marks`, (phase, time at which it began), with their durations. Training stops from the lead's word that it is at
    the boundary until joiners run; if that word was lost, the hand-over lies in the phase before.
    """
    phases = []
    for (name, began_ms), (then, ended_ms) in zip(marks, [*marks[1:], ("", end_ms)], strict=True):
        stops = name.startswith((HAND_OVER, FIRST_ITERATION))
        if then.startswith(FIRST_ITERATION) and not stops:
            name, stops = f"{name}, {HAND_OVER}", True
        phases.append(Phase(name=name, start_ms=began_ms, duration_ms=ended_ms - began_ms, overlapped=not stops))
    return tuple(phases)


def with_costs(incident: Incident, costs: Iterable[Cost]) -> Incident:
    """`incident` with the costs of all ranks: the longest downtime, the largest memory, links and bytes summed up.

    Lost time is that of the rank which lost most: ranks wait for each other, so a sum would count it many times.
    """
    known = list(costs)
    if not known:
        return incident
    changes = [
        cost.memory_after_bytes - cost.memory_before_bytes
        for cost in known
        if cost.peaks_bytes is None and cost.memory_before_bytes
    ]
    return msgspec.structs.replace(
        incident,
        downtime_ms=max((cost.downtime_ms for cost in known if cost.downtime_ms is not None), default=None),
        lost_ms=max((cost.lost_ms for cost in known if cost.lost_ms is not None), default=None),
        links_kept=sum(cost.links_kept for cost in known),
        links_replaced=sum(cost.links_replaced for cost in known),
        bytes_moved=sum(cost.bytes_moved for cost in known),
        memory_before_bytes=max(cost.memory_before_bytes for cost in known),
        memory_after_bytes=max(cost.memory_after_bytes for cost in known),
        memory_change_bytes=max(changes, key=abs, default=0),
        stayers_compared=len(changes),
        peaks_bytes={cost.global_rank: cost.peaks_bytes for cost in known if cost.peaks_bytes is not None},
        ranks_measured=len(known),
    )


def milliseconds(value: float | None) -> str:
    """A downtime or lost time, for people."""
    return "not measured" if value is None else f"{value:.1f} ms"
