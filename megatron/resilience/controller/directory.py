"""The resilience directory of a job: where its token, its controller's address, journal and event log are.

Made by `trainmover run` or by the controller, read by agents and by the commands of users. The token's file is for
its owner alone: who can read it can move machines.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TOKEN_BYTES = 32


class DirectoryError(Exception):
    """A resilience directory that is not one, or whose files cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResilienceDirectory:
    """See the module."""

    path: Path

    @property
    def journal(self) -> Path:
        """Of the controller."""
        return self.path / "journal.sqlite"

    @property
    def events(self) -> Path:
        """The event log."""
        return self.path / "events.jsonl"

    @property
    def controller_log(self) -> Path:
        """What the controller prints, where the launcher started it."""
        return self.path / "controller.log"

    @property
    def token_file(self) -> Path:
        """The job's token, mode 0600."""
        return self.path / "token"

    @property
    def address_file(self) -> Path:
        """`host:port` of the present controller."""
        return self.path / "address"

    def make(self) -> None:
        """Makes it, for its owner alone, if it is not there. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write_token(self, token: str) -> None:
        """Keeps `token`. Raises OSError."""
        _write(self.token_file, token)

    def write_address(self, address: str) -> None:
        """Says where the controller is now. Raises OSError."""
        _write(self.address_file, address)

    def read_token(self) -> str:
        """The job's token. Raises DirectoryError for a file that others may read."""
        text = _read(self.token_file, "a job's token")
        mode = stat.S_IMODE(self.token_file.stat().st_mode)
        if mode & 0o077:
            raise DirectoryError(
                f"found mode {mode:04o} of {self.token_file}, expected 0600, as who reads it can move machines; "
                f"run `chmod 600 {self.token_file}`"
            )
        return text

    def read_address(self) -> str:
        """`host:port` of the controller, as last written. Raises DirectoryError."""
        return _read(self.address_file, "a controller's address")


def draw_token() -> str:
    """A new token."""
    return secrets.token_hex(TOKEN_BYTES)


def newest(log_root: Path) -> ResilienceDirectory | None:
    """The newest job's under `log_root`, as `trainmover run` lays them out; None if there is none."""
    found: Iterable[Path] = log_root.glob("*/resilience/address")
    made = sorted(found, key=lambda path: path.stat().st_mtime_ns)
    return ResilienceDirectory(path=made[-1].parent) if made else None


def resolve_address(where: str) -> str:
    """`host:port` from TRAINMOVER_CONTROLLER: itself, or the present content of the file (or directory) it names.

    Raises DirectoryError while there is none.
    """
    if "/" not in where and ":" in where:
        return where
    path = Path(where)
    return _read(path / "address" if path.is_dir() else path, "a controller's address")


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DirectoryError(
            f"found no {path} ({error.strerror}), expected {what}; pass the --resilience-dir of a job"
        ) from error


def _write(path: Path, text: str) -> None:
    """At once or not at all, and never readable by others."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
