"""The journal on disk. A store keeps the bytes of entries in order; what `append` has returned for survives a crash.

`Store` is the interface; SQLite is the one that is embedded: a file in the resilience directory, one writer. The term
of a controller is the number of starts on the same journal. (Architecture, control plane.)
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.resilience.protocol.journal import Ledger, decode_entry

_SCHEMA = """
CREATE TABLE IF NOT EXISTS job (only INTEGER PRIMARY KEY CHECK (only = 1), description TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS starts (term INTEGER PRIMARY KEY AUTOINCREMENT, pid INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entries
    (number INTEGER PRIMARY KEY AUTOINCREMENT, term INTEGER NOT NULL, entry BLOB NOT NULL);
"""


class StoreError(Exception):
    """A journal that cannot be used: it is another job's, in use, damaged, or its disk is full."""


class Store(Protocol):
    """Where a controller's decisions are kept."""

    @property
    def term(self) -> int:
        """Higher than that of any controller that held this journal before."""

    def read(self) -> Sequence[bytes]:
        """All entries, oldest first."""

    def append(self, entry: bytes) -> None:
        """Writes one entry; returns once it is durable. Raises StoreError."""

    def close(self) -> None:
        """Gives the journal back."""


_DESCRIPTION = re.compile(r"job (.*), \d+ slots of \d+ ranks", re.DOTALL)


def describe_job(job: str, *, slots: int, ranks_per_machine: int) -> str:
    """What a journal says of itself, so that it is used for no other job."""
    return f"job {job}, {slots} slots of {ranks_per_machine} ranks"


def read_job(path: Path) -> str:
    """The name of a journal's job; empty if there is none in it. Raises StoreError."""
    found = _DESCRIPTION.fullmatch(next(iter(_select(path, "SELECT description FROM job")), ""))
    return found.group(1) if found else ""


def read_entries(path: Path) -> list[bytes]:
    """The entries of a journal that may be in use, oldest first; changes nothing. Raises StoreError."""
    return _select(path, "SELECT entry FROM entries ORDER BY number")


def _select(path: Path, query: str) -> list[Any]:
    """The only column that `query` asks for."""
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return [value for (value,) in database.execute(query)]
        finally:
            database.close()
    except sqlite3.Error as error:
        raise StoreError(f"found {path} not readable as a journal: {error}") from error


def read_ledger(path: Path) -> Ledger:
    """The sum of a journal's entries; it may be in use, and is not changed. Raises StoreError, JournalError."""
    ledger = Ledger()
    for entry in read_entries(path):
        ledger.apply(decode_entry(entry))
    return ledger


class SqliteStore:
    """One file, write-ahead log, every commit synchronised; a lock beside it keeps a second controller out."""

    def __init__(self, path: Path, *, description: str) -> None:
        self.path = path
        self.description = description
        self._term = 0
        self._lock = -1
        self._database: sqlite3.Connection | None = None

    def open(self) -> None:
        """Opens or makes the journal and begins a new term. Raises StoreError."""
        self._take_lock()
        try:
            database = sqlite3.connect(self.path, isolation_level=None)
            self._database = database
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            database.executescript(_SCHEMA)
            database.execute("INSERT OR IGNORE INTO job VALUES (1, ?)", (self.description,))
            (found,) = database.execute("SELECT description FROM job").fetchone()
            if found != self.description:
                raise StoreError(
                    f"found the journal of another job in {self.path} ({found}), expected {self.description}; "
                    "pass another --resilience-dir"
                )
            self._term = database.execute("INSERT INTO starts (pid) VALUES (?)", (os.getpid(),)).lastrowid or 0
        except sqlite3.Error as error:
            self.close()
            raise StoreError(f"found {self.path} not usable as a journal ({error}), expected one of ours") from error
        except StoreError:
            self.close()
            raise

    def _take_lock(self) -> None:
        lock_path = self.path.with_suffix(".lock")
        self._lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            self._lock = -1
            raise StoreError(
                f"found {self.path} in use by another controller, expected to be the only one; end that one first"
            ) from error

    @property
    def term(self) -> int:
        """Number of starts."""
        return self._term

    def read(self) -> list[bytes]:
        """All entries, oldest first. Raises StoreError."""
        try:
            return [entry for (entry,) in self._open().execute("SELECT entry FROM entries ORDER BY number")]
        except sqlite3.Error as error:
            raise StoreError(f"found {self.path} not readable: {error}") from error

    def append(self, entry: bytes) -> None:
        """Writes one entry; durable when it returns. Raises StoreError."""
        try:
            self._open().execute("INSERT INTO entries (term, entry) VALUES (?, ?)", (self._term, entry))
        except sqlite3.Error as error:
            raise StoreError(
                f"found {self.path} not writable ({error}), expected room for a decision before it is carried out; "
                "training goes on, free the disk and start the controller again"
            ) from error

    def close(self) -> None:
        """Closes the file and gives the lock back. Idempotent."""
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> sqlite3.Connection:
        assert self._database is not None, "open() comes first"
        return self._database
