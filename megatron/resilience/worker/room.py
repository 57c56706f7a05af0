"""What this process holds of its machine's memory and its device's, and the line that tells it to the controller.

Source: /proc/self/status, /proc/meminfo, the limits of the control groups it is in, torch's allocator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from megatron.resilience.agent.machine_facts import kernel_bytes
from megatron.resilience.protocol import messages
from megatron.resilience.protocol.memory import Peak, Room
from megatron.resilience.worker.agent_link import AgentLink
from megatron.resilience.worker.memory import own_bytes, peak_bytes

_GROUPS = Path("/sys/fs/cgroup")


class MeasuringLine:
    """A rank's line to its agent: adds what is measured at the moment of sending. See `rank_worker.Agent`."""

    def __init__(self, line: AgentLink) -> None:
        self._line = line

    def send(self, report: messages.RankReport) -> None:
        """A leaver's Ready and Left get its peak, Built the room there is."""
        match report:
            case messages.Built():
                report = msgspec.structs.replace(report, room=room())
            case messages.Ready() if report.transfer:
                report = msgspec.structs.replace(report, peak=peak())
            case messages.Left():
                report = msgspec.structs.replace(report, peak_bytes=peak_bytes())
        self._line.send(report)

    def take(self) -> list[messages.RankCommand]:
        """Commands that have come."""
        return self._line.take()


def peak() -> Peak:
    """The most this process has held until now: what training takes, once it has trained an iteration."""
    return Peak(
        host_bytes=own_bytes("VmHWM"),
        device_bytes=torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
    )


def room() -> Room:
    """What it holds now and what is left; the machine's or, if that is less, its control group's."""
    is_on_device = torch.cuda.is_available()
    left = [kernel_bytes(_read(Path("/proc/meminfo")), "MemAvailable"), *group_bytes_left(_own_group(), _GROUPS)]
    return Room(
        host_held_bytes=own_bytes("VmRSS"),
        host_free_bytes=max(0, min(left)),
        device_held_bytes=torch.cuda.memory_reserved() if is_on_device else 0,
        device_free_bytes=torch.cuda.mem_get_info()[0] if is_on_device else 0,
    )


def group_bytes_left(group: Path, root: Path) -> Iterator[int]:
    """What each control group from `group` up to `root` has left; pages of files that can be dropped count as left."""
    for folder in (group, *group.parents):
        limit = _read(folder / "memory.max").strip()
        if limit.isdigit():
            dropped = re.search(r"^inactive_file (\d+)$", _read(folder / "memory.stat"), flags=re.MULTILINE)
            used = int(_read(folder / "memory.current").strip() or 0)
            yield int(limit) - used + (int(dropped[1]) if dropped else 0)
        if folder == root:
            return


def _own_group() -> Path:
    found = re.search(r"^0::/(.*)$", _read(Path("/proc/self/cgroup")), flags=re.MULTILINE)
    return _GROUPS / found[1] if found else _GROUPS


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
