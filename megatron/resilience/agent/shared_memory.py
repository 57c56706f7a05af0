"""Removes the shared-memory files that a job's dead processes left in /dev/shm, and no others.

A file goes only if it appeared during the job, is ours, is used by no living process, and is provably the job's: its
name holds the pid of a dead process of the job (torch_PID_..., trainmover_PID_...), or one of the job's processes was
seen using it. Called by the spawner at its end, and by the launcher for a spawner that was killed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY_DIR = Path("/dev/shm")
_PID_IN_NAME = re.compile(r"^(?:torch|trainmover)_(\d+)_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A file in /dev/shm."""

    name: str
    owner_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A segment to remove, and why."""

    name: str
    reason: str


def decide_removals(
    segments: Iterable[Segment],
    *,
    names_before: frozenset[str],
    user_id: int,
    dead_pids: frozenset[int],
    names_seen: frozenset[str],
    names_in_use: frozenset[str],
) -> list[Removal]:
    """Which of `segments` are provably left by the job. Pure."""
    removals = []
    for segment in segments:
        if segment.name in names_before or segment.name in names_in_use or segment.owner_id != user_id:
            continue
        found = _PID_IN_NAME.match(segment.name)
        if found is not None:
            if int(found[1]) in dead_pids:
                removals.append(Removal(name=segment.name, reason=f"named after dead process {found[1]} of this job"))
        elif segment.name in names_seen:
            removals.append(Removal(name=segment.name, reason="was used by a process of this job"))
    return removals


def list_segments(directory: Path = SHARED_MEMORY_DIR) -> list[Segment]:
    """The regular files in `directory`; none if there is no such directory."""
    segments = []
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return []
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            segments.append(Segment(name=entry.name, owner_id=status.st_uid))
    return segments


def names_used_by(pids: Iterable[int], directory: Path = SHARED_MEMORY_DIR) -> frozenset[str]:
    """Names of the files in `directory` that any of `pids` has mapped. Processes that can't be read count as none."""
    names = set()
    mark = f"{directory}/".encode()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                lines = [line for line in file if mark in line]
        except OSError:
            continue
        names |= {line[line.index(mark) + len(mark) :].rstrip(b"\n").decode(errors="replace") for line in lines}
    return frozenset(names)


class SharedMemoryWatch:
    """Remembers what the job used, for the decision at its end."""

    def __init__(self) -> None:
        self._names_before = frozenset(segment.name for segment in list_segments())
        self._names_seen: set[str] = set()
        self._pids: set[int] = set()

    def note(self, pids: Iterable[int]) -> None:
        """`pids` are processes of the job; what they use now is the job's."""
        pids = set(pids)
        self._pids |= pids
        self._names_seen |= names_used_by(pids)

    def clean(self) -> list[Removal]:
        """Removes what is provably left; all noted processes should have ended. Returns what was removed."""
        segments = list_segments()
        if all(segment.name in self._names_before for segment in segments):
            return []
        living = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        removals = decide_removals(
            segments,
            names_before=self._names_before,
            user_id=os.geteuid(),
            dead_pids=frozenset(self._pids - living),
            names_seen=frozenset(self._names_seen),
            names_in_use=names_used_by(living),
        )
        for removal in removals:
            (SHARED_MEMORY_DIR / removal.name).unlink(missing_ok=True)
        return removals
