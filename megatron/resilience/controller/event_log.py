"""The event log of a job: one JSON object a line, written by the controller, read by people and by `jq`.

`BEGIN` and `END` enclose an incident, `INSTANT` is a moment of it; all lines of one incident share its `id`. A reader
that meets an unfinished last line after a crash may leave it out; the next line begins anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron.resilience.protocol.controller_words import Record


class EventLog:
    """Appends to one file; a line is handed to the kernel whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1

    def open(self) -> None:
        """Opens or makes the file. Raises OSError."""
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # a controller died in the middle of a line
            os.write(self._file, b"\n")

    def write(self, record: Record) -> None:
        """Appends one line. Raises OSError."""
        line = {
            "kind": record.kind,
            "id": record.incident_id,
            "name": record.name,
            "time_ms": round(record.time_ms, 3),
            "text": record.text,
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
