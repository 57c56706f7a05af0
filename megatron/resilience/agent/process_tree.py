"""Ends processes with all their descendants, so that nothing of a job outlives it. Linux only: prctl, /proc, pidfds.

Launcher and spawner are child subreapers: a process whose parent dies becomes their child and can't escape. Ranks ask
the kernel to be killed with their spawner; that wish isn't inherited by the helpers a rank forks, which the nearest
living subreaper finds and ends. Processes are named by pid and start time, and signalled through a pidfd, so that a
reused pid is never hit.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A living process, as /proc/PID/stat shows it."""

    pid: int
    parent_pid: int
    group_id: int
    start_ticks: int


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(number: int) -> None:
    """The kernel sends `number` to this process when the parent thread that forked it ends; 0 undoes it.

    The parent may be dead already: check getppid() afterwards. Kept over exec, not inherited by children.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def name_process(name: str) -> None:
    """What `ps` and `top` show for this process (at most 15 characters); an exec undoes it."""
    with open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def parse_stat(text: str) -> ProcessRecord | None:
    """The record in the text of a /proc/PID/stat file; None for a zombie. The name in it may hold any character."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if fields[0] in "ZX":
        return None
    return ProcessRecord(
        pid=int(head.split(" ", 1)[0]), parent_pid=int(fields[1]), group_id=int(fields[2]), start_ticks=int(fields[19])
    )


def read_process(pid: int) -> ProcessRecord | None:
    """The living process `pid`, or None."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return parse_stat(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None


def read_processes() -> dict[int, ProcessRecord]:
    """All living processes of this computer that can be seen."""
    records = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {record.pid: record for record in records if record is not None}


def descendants(
    processes: Mapping[int, ProcessRecord], root_pid: int, spared: Iterable[int] = ()
) -> list[ProcessRecord]:
    """Everything beneath `root_pid`, without the trees whose roots are in `spared`."""
    children: dict[int, list[ProcessRecord]] = {}
    for record in processes.values():
        children.setdefault(record.parent_pid, []).append(record)
    left_out = set(spared)
    found: list[ProcessRecord] = []
    waiting = [root_pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child.pid not in left_out:
                found.append(child)
                waiting.append(child.pid)
    return found


def group_members(processes: Mapping[int, ProcessRecord], group_id: int) -> list[ProcessRecord]:
    """The living members of one process group."""
    return [record for record in processes.values() if record.group_id == group_id]


def is_resource_tracker(pid: int) -> bool:
    """Whether `pid` is multiprocessing's tracker, which unlinks leaked shared memory when its last user has gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except (FileNotFoundError, ProcessLookupError):
        return False


def end_processes(
    find: Callable[[], list[ProcessRecord]], *, timeout_s: float = 2.0, tracker_s: float = 1.0
) -> set[ProcessRecord]:
    """Kills what `find` finds until it finds nothing more; returns what was ended.

    Resource trackers come last and get `tracker_s` to do their work. Blocks up to `timeout_s` a round of three.
    """
    ended = _kill_until_none(lambda: [record for record in find() if not is_resource_tracker(record.pid)], timeout_s)
    trackers = find()
    if trackers:
        _wait_for(_open_all(trackers), tracker_s)
        ended |= set(trackers) | _kill_until_none(find, timeout_s)
    return ended


def _kill_until_none(find: Callable[[], list[ProcessRecord]], timeout_s: float) -> set[ProcessRecord]:
    deadline = time.monotonic() + timeout_s
    ended: set[ProcessRecord] = set()
    while (found := find()) and (left_s := deadline - time.monotonic()) > 0:
        pidfds = _open_all(found)
        for pidfd in pidfds:
            _send(pidfd, signal.SIGKILL)
        ended |= set(found)
        _wait_for(pidfds, left_s)
    return ended


def _open_all(records: Iterable[ProcessRecord]) -> list[int]:
    pidfds = []
    for record in records:
        try:
            pidfd = os.pidfd_open(record.pid)
        except ProcessLookupError:
            continue
        now = read_process(record.pid)
        if now is not None and now.start_ticks == record.start_ticks:
            pidfds.append(pidfd)
        else:
            os.close(pidfd)
    return pidfds


def _send(pidfd: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return


def _wait_for(pidfds: list[int], timeout_s: float) -> None:
    """Waits until all have ended, or `timeout_s`; closes the descriptors."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    left = set(pidfds)
    while left and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left_s * 1000):
            poll.unregister(pidfd)
            left.discard(pidfd)
    for pidfd in pidfds:
        os.close(pidfd)


def reap_children(before_reaping: Callable[[int], None] = lambda pid: None) -> list[tuple[int, int]]:
    """Collects all children that have ended: (pid, exit code or minus the signal). Never blocks.

    `before_reaping(pid)` runs while the dead child still holds its pid, and so its process group's number.
    """
    reaped: list[tuple[int, int]] = []
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return reaped
        if ended is None:
            return reaped
        before_reaping(ended.si_pid)
        pid, status = os.waitpid(ended.si_pid, 0)
        reaped.append((pid, os.waitstatus_to_exitcode(status)))
