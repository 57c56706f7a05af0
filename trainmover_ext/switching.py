"""Replacing ranks while the others go on: prepare, commit, abort; hold, leave; join, go live; notes. For resilience.

One switch moves some global ranks to other processes. Their holders, the leavers, and those who take over, the joiners,
never speak over this data plane; everybody else is a stayer. The order of one switch of generation g:

| when | leaver | stayer with a link to it | joiner (built alone) |
|---|---|---|---|
| before | | | `join_switch` |
| in the background | | `prepare_switch`, `switch_state` | |
| boundary, no work outstanding | `hold_links`, `handover` | | |
| verdict: leave | `leave_switch` | `commit_switch` | `go_live` |
| verdict: stay | `abort_switch` | `abort_switch` | `abort_switch` |

Stayers without a link do nothing, and hear of it later by `add_endpoints`. Every call raises SwitchError, and changes
nothing, when it is not its turn. docs/decisions/0009 says why it is so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trainmover_ext import rendezvous
from trainmover_ext.endpoints import decode_endpoint
from trainmover_ext.errors import SwitchError

__all__ = [
    "NOTE_BYTES_MAX",
    "LinkTally",
    "Note",
    "SwitchPhase",
    "SwitchState",
    "SwitchTally",
    "abort_switch",
    "check_handover",
    "commit_switch",
    "control_stats",
    "go_live",
    "handover",
    "hold_links",
    "join_switch",
    "leave_switch",
    "linked_ranks",
    "prepare_switch",
    "receive_note",
    "send_note",
    "switch_state",
]

NOTE_BYTES_MAX = 64 * 1024


class SwitchPhase(StrEnum):
    """How far a prepared switch is. What is broken stays so until it is aborted."""

    PENDING = "pending"
    READY = "ready"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchState:
    """Answer of `switch_state`."""

    phase: SwitchPhase
    reason: str
    """Of BROKEN; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTally:
    """What a commit did to live links. Dropped ones had not been prepared: they connect at their next use."""

    kept: int
    replaced: int
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTally:
    """Answer of `commit_switch`."""

    generation: int
    communicators: Mapping[str, LinkTally]
    """By name, as in `communicator_stats`."""

    @property
    def links(self) -> LinkTally:
        """Of all communicators together."""
        tallies = self.communicators.values()
        return LinkTally(
            kept=sum(tally.kept for tally in tallies),
            replaced=sum(tally.replaced for tally in tallies),
            dropped=sum(tally.dropped for tally in tallies),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A small message from one rank to another."""

    peer: int
    """Global rank of the sender."""
    generation: int
    """That the note is about, in the sender's word."""
    payload: bytes


def prepare_switch(generation: int, endpoints: Mapping[int, str]) -> None:
    """Stayer: begins to connect to the processes at `endpoints`, which are to take these global ranks, and returns.

    Each link that lives to one of these ranks gets one beside it. Operations go on. `switch_state` tells how far it is.
    """
    moved = {rank: decode_endpoint(text) for rank, text in endpoints.items()}
    rendezvous.current().runtime.prepare_switch(generation, moved)


def switch_state(generation: int) -> SwitchState:
    """How far the switch is. Looks at each prepared link; takes some microseconds, and more only with many of them.

    A joiner asks too: READY, or BROKEN once a stayer was lost or aborted its collectives.
    """
    phase, reason = rendezvous.current().runtime.switch_state(generation)
    return SwitchState(phase=SwitchPhase(phase), reason=reason)


def commit_switch(generation: int) -> SwitchTally:
    """Stayer: prepared links become the live ones; those that were not prepared, or broke, connect at their next use.

    Waits for nobody. Raises SwitchError when something is outstanding on a link to a rank that moves.
    """
    told = rendezvous.current().runtime.commit_switch(generation)
    tallies = {name: LinkTally(kept=kept, replaced=replaced, dropped=dropped) for name, kept, replaced, dropped in told}
    return SwitchTally(generation=generation, communicators=tallies)


def abort_switch(generation: int) -> None:
    """Undoes `prepare_switch`, `hold_links` or what has connected since `join_switch`. Idempotent."""
    rendezvous.current().runtime.abort_switch(generation)


def hold_links(generation: int) -> tuple[int, ...]:
    """Leaver, with nothing outstanding: lets nobody make a link any more, and returns the ranks that have one.

    Whoever calls waits until `abort_switch`, or is refused after `leave_switch`. Blocks for at most a second.
    """
    return tuple(rendezvous.current().runtime.hold_links(generation))


def handover() -> str:
    """Leaver, after `hold_links`: what the joiner's `go_live` has to know of this rank. It goes with the state."""
    recovery, places = rendezvous.current().runtime.handover()
    return json.dumps({"recovery": recovery, "places": places}, sort_keys=True)


def leave_switch(generation: int) -> None:
    """Leaver: the rank is another process's now. What peers do, and their silence, means nothing here any more.

    Notes that were sent before go out first. Operations raise SwitchError from now on. When it returns, the peers have
    been told (it waits for that at most half a second), so this process may end.
    """
    rendezvous.current().runtime.leave_switch(generation)


def join_switch(generation: int, endpoints: Mapping[int, str], generations: Mapping[int, int] | None = None) -> None:
    """Joiner, built alone: takes connections of `generation` from the ranks at `endpoints` from now on.

    `generations`: in which their slots last changed hands, where that is not 1. Once more, with a later generation,
    after an abort. Forgets all connections there were.
    """
    runtime = rendezvous.current().runtime
    decoded = {rank: decode_endpoint(text) for rank, text in endpoints.items() if rank != runtime.global_rank}
    of_rank = generations or {}
    for since in sorted({of_rank.get(rank, 1) for rank in decoded}):
        runtime.add_endpoints({r: at for r, at in decoded.items() if of_rank.get(r, 1) == since}, since)
    runtime.join_switch(generation)


def go_live(generation: int, handover: str, endpoints: Mapping[int, str] | None = None) -> None:
    """Joiner: becomes a live member at the place that the leaver has handed over.

    `endpoints`: of the other ranks that move in this switch. Prepared links are used, others are made at first use.
    """
    recovery, places = _told_by(handover)
    runtime = rendezvous.current().runtime
    if endpoints:
        others = {rank: decode_endpoint(text) for rank, text in endpoints.items() if rank != runtime.global_rank}
        runtime.add_endpoints(others, generation)
    runtime.go_live(generation, recovery, places)


def check_handover(generation: int, handover: str) -> None:
    """Joiner, before the verdict: raises SwitchError for a handover that `go_live` would refuse. Changes nothing."""
    recovery, places = _told_by(handover)
    if recovery >= generation:
        raise SwitchError(
            f"generation {generation}: found a handover of generation {recovery}, expected an earlier one"
        )
    _, here = rendezvous.current().runtime.handover()
    missing = sorted(set(places) - set(here))
    if missing:
        raise SwitchError(
            f"generation {generation}: the leaver has a group {missing[0]}, which this process has not made; it must "
            "make the same groups in the same order"
        )


def _told_by(handover: str) -> tuple[int, dict[str, list[int]]]:
    """The generation of the last recovery, and the place of each group. Raises SwitchError for other text."""
    try:
        told = json.loads(handover)
        recovery, places = int(told["recovery"]), {str(name): list(map(int, p)) for name, p in told["places"].items()}
        if any(len(place) != 3 for place in places.values()):
            raise ValueError("a place is not three numbers")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SwitchError(
            f"found the handover {handover[:200]!r} ({error}); expected the text of handover() on the leaver"
        ) from error
    return recovery, places


def linked_ranks() -> tuple[int, ...]:
    """Global ranks to which a link lives here, or with which a segment is shared."""
    return tuple(rendezvous.current().runtime.linked_ranks())


def send_note(peer: int, generation: int, payload: bytes) -> None:
    """Queues `payload`, of at most NOTE_BYTES_MAX, for global rank `peer`, in order, over the live control channel.

    `generation`: what the note is about; `peer` gets it as given. A note never goes to another process than the one
    that held the rank when it was sent. Raises TransportError when too many wait for that rank.
    """
    rendezvous.current().runtime.send_note(peer, generation, payload)


def receive_note(timeout_s: float) -> Note | None:
    """The oldest note that has come; waits up to `timeout_s` for one."""
    told = rendezvous.current().runtime.receive_note(max(0, int(timeout_s * 1000)))
    return None if told is None else Note(peer=told[0], generation=told[1], payload=told[2])


def control_stats() -> dict[str, int]:
    """Messages and connections of this process beside the data so far, heartbeats not counted."""
    return rendezvous.current().runtime.control_stats()
