"""Which files in /dev/shm are the job's to remove."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from megatron.resilience.agent.shared_memory import Segment, decide_removals, list_segments, names_used_by


def removed(
    *names: str,
    before: frozenset[str] = frozenset(),
    seen: frozenset[str] = frozenset(),
    in_use: frozenset[str] = frozenset(),
    owner_id: int = 1000,
) -> list[str]:
    removals = decide_removals(
        [Segment(name=name, owner_id=owner_id) for name in names],
        names_before=before,
        user_id=1000,
        dead_pids=frozenset({77}),
        names_seen=seen,
        names_in_use=in_use,
    )
    return [removal.name for removal in removals]


def test_name_with_a_dead_pid_of_the_job_is_removed_and_no_other_pid() -> None:
    assert removed("torch_77_1_0", "torch_78_1_0", "torch_777_1", "trainmover_77_ring") == [
        "torch_77_1_0",
        "trainmover_77_ring",
    ]


def test_other_names_are_removed_only_if_seen_in_use_by_the_job() -> None:
    assert removed("psm_a", "psm_b", "sem.mp-77", seen=frozenset({"psm_b"})) == ["psm_b"]


def test_seen_name_with_a_living_pid_stays() -> None:
    assert removed("torch_78_1", seen=frozenset({"torch_78_1"})) == []


def test_what_was_there_before_or_is_still_used_or_is_anothers_stays() -> None:
    assert removed("torch_77_a", before=frozenset({"torch_77_a"})) == []
    assert removed("torch_77_a", in_use=frozenset({"torch_77_a"})) == []
    assert removed("torch_77_a", owner_id=0) == []


def test_mapped_files_of_a_process_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "psm_x y"
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert names_used_by([os.getpid(), 2**22 + 1], tmp_path) == {"psm_x y"}
    assert names_used_by([os.getpid()], tmp_path) == set()


def test_only_regular_files_are_listed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "directory").mkdir()
    assert list_segments(tmp_path) == [Segment(name="file", owner_id=os.geteuid())]
    assert list_segments(tmp_path / "missing") == []
