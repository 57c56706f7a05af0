"""Finding and ending processes: the pure parts on made-up tables, the rest on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from megatron.resilience.agent.process_tree import (
    ProcessRecord,
    descendants,
    end_processes,
    group_members,
    is_resource_tracker,
    parse_stat,
    read_process,
    reap_children,
)

FIELDS = "0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 1"


def record(pid: int, parent_pid: int, group_id: int = 0) -> ProcessRecord:
    return ProcessRecord(pid=pid, parent_pid=parent_pid, group_id=group_id, start_ticks=0)


def table(*records: ProcessRecord) -> dict[int, ProcessRecord]:
    return {entry.pid: entry for entry in records}


def test_stat_is_read_whatever_the_name_of_the_program() -> None:
    found = parse_stat(f"77 (a) S (b) S 5 70 70 {FIELDS}")
    assert found == ProcessRecord(pid=77, parent_pid=5, group_id=70, start_ticks=4242)


def test_zombies_are_not_living() -> None:
    assert parse_stat(f"77 (sh) Z 5 70 70 {FIELDS}") is None


def test_this_process_is_found_with_its_parent() -> None:
    found = read_process(os.getpid())
    assert found is not None
    assert found.parent_pid == os.getppid()


def test_descendants_are_found_at_any_depth_and_spared_trees_are_not() -> None:
    processes = table(record(2, 1), record(3, 2), record(4, 3), record(5, 2), record(6, 5), record(9, 1))
    assert {entry.pid for entry in descendants(processes, 2)} == {3, 4, 5, 6}
    assert {entry.pid for entry in descendants(processes, 2, spared=[3])} == {5, 6}


def test_group_members() -> None:
    processes = table(record(2, 1, 2), record(3, 2, 2), record(4, 2, 4))
    assert {entry.pid for entry in group_members(processes, 2)} == {2, 3}


def found_again(pid: int) -> list[ProcessRecord]:
    living = read_process(pid)
    return [] if living is None else [living]


def test_stubborn_process_is_ended() -> None:
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ended = end_processes(lambda: found_again(process.pid))
        assert {entry.pid for entry in ended} == {process.pid}
        assert process.wait(timeout=1) == -signal.SIGKILL


def test_process_with_a_reused_pid_is_not_touched() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        living = read_process(process.pid)
        assert living is not None
        older = ProcessRecord(pid=living.pid, parent_pid=0, group_id=0, start_ticks=living.start_ticks - 1)
        end_processes(lambda: [older], timeout_s=0.05, tracker_s=0.05)
        assert process.poll() is None
        process.kill()


def test_resource_tracker_is_told_from_other_processes() -> None:
    program = "import signal; print(flush=True); signal.pause()"
    arguments = ["-c", program, "from multiprocessing.resource_tracker import main"]
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert is_resource_tracker(process.pid)
        assert not is_resource_tracker(os.getpid())
        process.kill()


def test_children_are_reaped_after_the_hook_saw_them_dead_but_unreaped() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    states: dict[int, str] = {}

    def note(dead: int) -> None:
        with open(f"/proc/{dead}/stat", encoding="utf-8") as file:
            states[dead] = file.read().rpartition(")")[2].split()[0]

    assert (pid, 7) in reap_children(note)
    assert states[pid] == "Z"
    assert not os.path.exists(f"/proc/{pid}")
