"""The SQLite journal: order, terms, durability over kill -9, and who is kept out."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.resilience.controller.store import SqliteStore, StoreError, read_entries

WRITER = """
import os, signal, sys
from pathlib import Path
from megatron.resilience.controller.store import SqliteStore
store = SqliteStore(Path(sys.argv[1]), description="job a")
store.open()
for number in range(5):
    store.append(f"entry {number} of term {store.term}".encode())
os.kill(os.getpid(), signal.SIGKILL)
"""


def opened(path: Path, description: str = "job a") -> SqliteStore:
    store = SqliteStore(path, description=description)
    store.open()
    return store


def test_entries_come_back_in_order_under_a_higher_term(tmp_path: Path) -> None:
    store = opened(tmp_path / "journal.sqlite")
    assert (store.term, store.read()) == (1, [])
    written = [bytes([number]) * number for number in range(50)]
    for entry in written:
        store.append(entry)
    store.close()
    store.close()
    again = opened(tmp_path / "journal.sqlite")
    assert again.term == 2
    assert again.read() == written
    again.close()


def test_what_was_appended_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", WRITER, str(path)], cwd=Path(__file__).parents[4], check=False)
        assert done.returncode == -signal.SIGKILL
    store = opened(path)
    assert store.term == 3
    assert store.read() == [f"entry {number} of term {term}".encode() for term in (1, 2) for number in range(5)]
    store.close()


def test_commits_are_synchronised(tmp_path: Path) -> None:
    store = opened(tmp_path / "journal.sqlite")
    database = store._open()
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert database.execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()


def test_second_controller_is_kept_out_until_the_first_ends(tmp_path: Path) -> None:
    first = opened(tmp_path / "journal.sqlite")
    with pytest.raises(StoreError, match="in use by another controller"):
        opened(tmp_path / "journal.sqlite")
    first.close()
    opened(tmp_path / "journal.sqlite").close()


def test_journal_of_another_job_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    opened(tmp_path / "journal.sqlite").close()
    with pytest.raises(StoreError, match=r"the journal of another job .* \(job a\), expected job b"):
        opened(tmp_path / "journal.sqlite", "job b")
    again = opened(tmp_path / "journal.sqlite")
    assert again.term == 2
    again.close()


def test_entries_can_be_read_while_a_controller_holds_the_journal(tmp_path: Path) -> None:
    store = opened(tmp_path / "journal.sqlite")
    store.append(b"one")
    assert read_entries(tmp_path / "journal.sqlite") == [b"one"]
    store.append(b"two")
    assert read_entries(tmp_path / "journal.sqlite") == [b"one", b"two"]
    store.close()
    assert read_entries(tmp_path / "journal.sqlite") == [b"one", b"two"]
    with pytest.raises(StoreError, match="not readable as a journal"):
        read_entries(tmp_path / "missing.sqlite")


def test_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(StoreError, match="not usable as a journal"):
        opened(tmp_path / "journal.sqlite")


def test_entry_that_cannot_be_written_raises(tmp_path: Path) -> None:
    store = opened(tmp_path / "journal.sqlite")
    other = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
    other.execute("DROP TABLE entries")
    other.close()
    with pytest.raises(StoreError, match="not writable"):
        store.append(b"decision")
    store.close()
    assert os.path.exists(tmp_path / "journal.lock")
