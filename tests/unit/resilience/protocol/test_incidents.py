"""What all ranks measured, put together."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron.resilience.protocol.incidents import Cost, Incident, milliseconds, with_costs

INCIDENT = Incident(
    incident_id="g2",
    kind="migration",
    outcome="done",
    why="",
    leavers=("m1",),
    joiners=("m3",),
    reasons=("asked for",),
    slots=(1,),
    generation=2,
)


def cost(downtime_ms: float | None, links: int, **changed: Any) -> Cost:
    told = Cost(
        downtime_ms=downtime_ms,
        lost_ms=None if downtime_ms is None else downtime_ms + 1,
        links_kept=links,
        links_replaced=1,
        bytes_moved=10,
        memory_before_bytes=5,
        memory_after_bytes=6,
    )
    return msgspec.structs.replace(told, **changed)


def test_the_slowest_rank_counts_and_links_add_up() -> None:
    both = with_costs(INCIDENT, [cost(3.0, 1), cost(-2.0, 4)])
    assert (both.downtime_ms, both.lost_ms) == (3.0, 4.0)
    assert (both.links_kept, both.links_replaced, both.bytes_moved) == (5, 2, 20)
    assert (both.memory_before_bytes, both.memory_after_bytes, both.ranks_measured) == (5, 6, 2)


def test_the_stayer_whose_memory_changed_most_counts_and_who_moved_tells_peaks() -> None:
    incident = with_costs(
        INCIDENT,
        [
            cost(1.0, 0, global_rank=0),
            cost(1.0, 0, global_rank=1, memory_after_bytes=2),
            cost(1.0, 0, global_rank=2, memory_before_bytes=0, memory_after_bytes=90, peaks_bytes=(70, 60)),
            cost(1.0, 0, global_rank=3, memory_before_bytes=0, memory_after_bytes=90),
        ],
    )
    assert (incident.memory_change_bytes, incident.stayers_compared) == (-3, 2)
    assert incident.peaks_bytes == {2: (70, 60)}
    assert msgspec.json.decode(msgspec.json.encode(incident), type=Incident) == incident
    quiet = with_costs(INCIDENT, [cost(1.0, 0, memory_after_bytes=5)])
    assert (quiet.memory_change_bytes, quiet.stayers_compared, quiet.peaks_bytes) == (0, 1, {})


def test_nothing_is_clamped_and_nothing_made_up() -> None:
    assert with_costs(INCIDENT, [cost(-2.0, 0)]).downtime_ms == -2.0
    assert with_costs(INCIDENT, []) is INCIDENT
    alone = with_costs(INCIDENT, [cost(None, 3)])
    assert (alone.downtime_ms, alone.lost_ms, alone.links_kept) == (None, None, 3)
    assert with_costs(INCIDENT, [cost(None, 0), cost(-2.0, 0)]).downtime_ms == -2.0


def test_what_nobody_measured_is_not_called_nothing() -> None:
    assert [milliseconds(value) for value in (0.0, -2.04, None)] == ["0.0 ms", "-2.0 ms", "not measured"]
