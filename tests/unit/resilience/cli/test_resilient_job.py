"""What the launcher reads of its controller: whether the job has ended, and its last words."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.resilience.cli.resilient_job import has_ended, last_line
from megatron.resilience.controller.directory import ResilienceDirectory
from megatron.resilience.controller.store import SqliteStore
from megatron.resilience.protocol.journal import JobEnded, encode_entry


def test_job_has_ended_when_its_journal_says_so(tmp_path: Path) -> None:
    directory = ResilienceDirectory(path=tmp_path)
    assert not has_ended(directory)
    store = SqliteStore(directory.journal, description="a")
    store.open()
    assert not has_ended(directory)
    store.append(encode_entry(JobEnded(time_ms=1.0, ok=True, why="all ranks have finished")))
    assert has_ended(directory)
    store.close()
    assert has_ended(directory)
    directory.journal.write_bytes(b"no journal" * 1000)
    assert not has_ended(directory)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "it said nothing"),
        (b"one\ntwo\n", "two"),
        (b"one\nhalf", "half"),
        (b"x" * 10_000_000 + b"\nlast \xff\n\n", "last \ufffd"),
    ],
)
def test_last_line_is_read_from_the_tail(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "log").write_bytes(content)
    assert last_line(tmp_path / "log") == line
    assert "cannot be read" in last_line(tmp_path / "none")
