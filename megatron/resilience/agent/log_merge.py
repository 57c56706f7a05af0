"""Turns what ranks print into the lines of one log. Pure: bytes in, whole lines out.

The spawner splits each rank's output and prefixes it; the launcher takes the prefix off again, to see progress and to
show a warning that every rank prints only once.
"""

from __future__ import annotations

import re
from collections import OrderedDict

LINE_BYTES_MAX = 16 * 1024
_PREFIX = re.compile(r"^\[rank +(\d+)\] ?(.*)$", re.DOTALL)
_WARNING = re.compile(r"\w*Warning\b|\bwarnings?\.warn\(|\bWARNING\b|^\[W\d{3}")


class LineSplitter:
    """Cuts a stream of bytes into lines.

    A carriage return starts the line anew, as on a terminal: of a progress bar only its last state is kept. What isn't
    UTF-8 is replaced; of a line over `line_bytes_max` the rest is dropped, and the line says so.
    """

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._pending = b""
        self._is_dropping = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, rest = (self._pending + data).split(b"\n")
        lines = [line for piece in whole if (line := self._finish(piece)) is not None]
        self._pending = self._bound(rest, lines)
        return lines

    def flush(self) -> list[str]:
        """The unfinished last line, if there is one."""
        rest, self._pending = self._pending, b""
        line = self._finish(rest) if rest else None
        self._is_dropping = False
        return [] if not line else [line]

    def _finish(self, piece: bytes) -> str | None:
        if self._is_dropping:
            self._is_dropping = False
            return None
        piece = _after_carriage_returns(piece)
        return self._cut(piece) if len(piece) > self._line_bytes_max else _decode(piece)

    def _bound(self, rest: bytes, lines: list[str]) -> bytes:
        if self._is_dropping:
            return b""
        if len(rest) <= self._line_bytes_max:
            return rest
        rest = _after_carriage_returns(rest)
        if len(rest) <= self._line_bytes_max:
            return rest
        lines.append(self._cut(rest))
        self._is_dropping = True
        return b""

    def _cut(self, piece: bytes) -> str:
        return f"{_decode(piece[: self._line_bytes_max])} ... (cut after {self._line_bytes_max} bytes)"


def _after_carriage_returns(piece: bytes) -> bytes:
    return piece.rstrip(b"\r").rpartition(b"\r")[2]


def _decode(piece: bytes) -> str:
    return piece.decode("utf-8", errors="replace")


def prefix(global_rank: int, world_size: int) -> str:
    """`[rank 3] `, as wide for every rank of the job."""
    return f"[rank {global_rank:>{len(str(world_size - 1))}}] "


def parse_prefix(line: str) -> tuple[int | None, str]:
    """(global rank, text) of a prefixed line; (None, line) of any other."""
    found = _PREFIX.match(line)
    return (int(found[1]), found[2]) if found else (None, line)


class WarningFolder:
    """Says which lines to show: a warning that another rank has printed in the same words is shown once."""

    def __init__(self, remembered_max: int = 512) -> None:
        self._remembered_max = remembered_max
        self._first_rank: OrderedDict[str, int] = OrderedDict()
        self.folded = 0

    def shows(self, global_rank: int, text: str) -> bool:
        """Whether to show `text` of `global_rank`. A rank's own repetitions are always shown."""
        if not _WARNING.search(text):
            return True
        first = self._first_rank.setdefault(text, global_rank)
        if len(self._first_rank) > self._remembered_max:
            self._first_rank.popitem(last=False)
        if first == global_rank:
            return True
        self.folded += 1
        return False
