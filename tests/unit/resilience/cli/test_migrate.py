"""The one line that tells what a migration cost."""

from __future__ import annotations

import pytest

from megatron.resilience.cli.migrate import bytes_text, describe_parts
from megatron.resilience.protocol.incidents import Incident, Phase

INCIDENT = Incident(
    incident_id="g2",
    kind="migration",
    outcome="done",
    why="",
    leavers=("machine-1",),
    joiners=("machine-4",),
    reasons=("the only machine that is free and fits",),
    slots=(1,),
    generation=2,
    boundary=41,
    phases=(
        Phase(name="start joiner", start_ms=0.0, duration_ms=812.4, overlapped=True),
        Phase(name="hand over", start_ms=812.4, duration_ms=120.0, overlapped=False),
        Phase(name="first iteration", start_ms=932.4, duration_ms=310.0, overlapped=False),
    ),
    downtime_ms=12.3,
    lost_ms=-4.0,
    links_kept=30,
    links_replaced=12,
    bytes_moved=4_200_000,
    ranks_measured=8,
)


def test_parts_tell_phases_links_and_bytes() -> None:
    assert describe_parts(INCIDENT) == (
        " (start joiner 812 ms overlapped, hand over 120 ms, first iteration 310 ms; 12 links replaced, 30 kept, "
        "4.2 MB moved)"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (4_200_000, "4.2 MB"), (7 * 10**9, "7.0 GB"), (10**13, "10.0 TB")],
)
def test_bytes_are_written_for_people(number: int, text: str) -> None:
    assert bytes_text(number) == text
