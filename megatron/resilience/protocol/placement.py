"""Which machine takes a slot, and why. Pure; called by the controller's core for every leaver of a migration.

Same rack first where racks are given, then health (fewer failed tries), then the longest idle, then the name.
What does not fit at all is refused with its reason, so that a user who gets no machine reads why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.resilience.protocol.facts import Capacity, Facts, differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A machine that may take a slot, as the controller sees it now."""

    machine_id: str
    rack: str
    attached: bool
    busy: str
    """Why it cannot be had, e.g. that it holds a slot; empty if it can."""
    failures: int
    """How often it failed as a joiner: health."""
    idle_since_ms: float
    capacity: Capacity
    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a slot asks of a machine."""

    ranks: int
    memory_bytes: int
    """0 while not known."""
    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The machine chosen, and why; or none, and why not each."""

    machine_id: str | None
    reason: str


def obstacle(candidate: Candidate, need: Need) -> str:
    """Why `candidate` cannot take a slot; empty if it can."""
    if candidate.busy:
        return candidate.busy
    if not candidate.attached:
        return "its agent is not connected"
    if candidate.capacity.ranks < need.ranks:
        return f"it holds {candidate.capacity.ranks} ranks, the slot has {need.ranks}"
    if candidate.capacity.memory_bytes < need.memory_bytes:
        return f"it has {candidate.capacity.memory_bytes} bytes of memory, the slot needs {need.memory_bytes}"
    differing = differences(candidate.facts, need.facts)
    if differing:
        return f"training there would give other bits ({'; '.join(differing)})"
    return ""


def place(candidates: Iterable[Candidate], need: Need, *, rack: str, wanted: str | None = None) -> Placement:
    """Choose for a slot whose leaver stands in `rack` (empty if racks are not known); `wanted` allows one alone."""
    known = sorted(candidates, key=lambda candidate: natural(candidate.machine_id))
    if wanted is not None:
        known = [candidate for candidate in known if candidate.machine_id == wanted]
        if not known:
            return Placement(machine_id=None, reason=f"machine {wanted} is unknown")
    fitting, refused = [], []
    for candidate in known:
        why = obstacle(candidate, need)
        if why:
            refused.append(f"{candidate.machine_id}: {why}")
        else:
            fitting.append(candidate)
    if not fitting:
        return Placement(machine_id=None, reason="; ".join(refused) or "no machine beside those of the job is known")
    best = min(fitting, key=lambda candidate: _order(candidate, rack))
    return Placement(machine_id=best.machine_id, reason=_reason(best, fitting, rack, wanted))


def _order(candidate: Candidate, rack: str) -> tuple[bool, int, float, list[tuple[int, int | str]]]:
    return (
        bool(rack) and candidate.rack != rack,
        candidate.failures,
        candidate.idle_since_ms,
        natural(candidate.machine_id),
    )


def _reason(best: Candidate, fitting: list[Candidate], rack: str, wanted: str | None) -> str:
    if wanted is not None:
        return "asked for"
    if len(fitting) == 1:
        return "the only machine that is free and fits"
    others = [candidate for candidate in fitting if candidate is not best]
    if rack and best.rack == rack:
        alike = [candidate for candidate in others if candidate.rack == rack]
        if not alike:
            return f"the only one in rack {rack}"
        return f"same rack {rack}, {_within(best, alike)}"
    return _within(best, others)


def _within(best: Candidate, others: list[Candidate]) -> str:
    if all(best.failures < other.failures for other in others):
        return "best health"
    level = [other for other in others if other.failures == best.failures]
    if all(best.idle_since_ms < other.idle_since_ms for other in level):
        return "longest idle"
    return "first by name among equals"


def natural(name: str) -> list[tuple[int, int | str]]:
    """Key that sorts machine-2 before machine-10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
