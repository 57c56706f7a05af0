"""What a process measures of itself, and what the line adds to reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.memory import Peak, Room
from megatron.resilience.protocol.messages import Built, Left, Progress, Query, RankReport, Ready
from megatron.resilience.worker.agent_link import AgentLink
from megatron.resilience.worker.room import MeasuringLine, group_bytes_left, peak, room

QUERY = Query(generation=2)
GROW = """
from megatron.resilience.worker.room import peak, room
before = (peak().host_bytes, room().host_held_bytes)
held = bytearray(b"x") * (256 << 20)
between = room().host_held_bytes
del held
print(*before, between, peak().host_bytes, room().host_held_bytes)
"""


class Line:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[RankReport] = []

    def send(self, report: RankReport) -> None:
        self.sent.append(report)

    def take(self) -> list[Any]:
        return [QUERY]


def test_a_peak_stays_and_what_is_held_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, timeout=60, check=True)
    peak_before, held_before, held_between, peak_after, held_after = map(int, done.stdout.split())
    grown = 256 << 20
    assert held_between >= held_before + grown * 9 // 10
    assert held_after <= held_between - grown * 9 // 10
    assert peak_after >= max(peak_before, held_between) * 99 // 100  # the kernel counts in batches


def test_this_machine_has_something_left() -> None:
    found = room()
    assert 0 < found.host_held_bytes <= peak().host_bytes
    assert found.host_free_bytes > 0


def test_a_control_group_has_what_its_limit_leaves_and_so_have_those_above(tmp_path: Path) -> None:
    group = tmp_path / "job" / "rank"
    group.mkdir(parents=True)
    assert list(group_bytes_left(group, tmp_path)) == []
    (group / "memory.max").write_text("max\n")
    for folder, limit in ((tmp_path / "job", "1000"), (tmp_path, "5000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
    (tmp_path / "job" / "memory.stat").write_text("anon 500\ninactive_file 150\nactive_file 50\n")
    assert list(group_bytes_left(group, tmp_path)) == [450, 4300]


def test_the_line_adds_what_is_measured_to_two_reports_and_no_others() -> None:
    line = Line()
    measuring = MeasuringLine(cast(AgentLink, line))
    for report in (
        Built(generation=2, endpoint="h", facts=Facts(), memory_bytes=1),
        Ready(generation=2, linked=(1,), transfer="h:1"),
        Ready(generation=2, linked=(1,)),
        Left(generation=2, boundary=9),
        Progress(iteration=1, median_iteration_ms=1.0),
    ):
        measuring.send(report)
    built, leaver, stayer, left, progress = line.sent
    assert isinstance(built, Built)
    assert built.room != Room()
    assert isinstance(leaver, Ready)
    assert leaver.peak != Peak()
    assert (leaver.linked, leaver.transfer) == ((1,), "h:1")
    assert isinstance(stayer, Ready)
    assert stayer.peak == Peak()
    assert isinstance(left, Left)
    assert (left.boundary, left.peak_bytes) == (9, leaver.peak.host_bytes)
    assert isinstance(progress, Progress)
    assert measuring.take() == [QUERY]
