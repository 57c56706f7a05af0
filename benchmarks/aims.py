"""Aims of a benchmark: a line for each, and with `--strict` an exit code. Called by all benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

MET, MISSED = "met", "MISSED"


def verdict(met: bool) -> str:
    """As it is printed and written."""
    return MET if met else MISSED


def line(met: bool, text: str) -> str:
    """What is printed of one aim."""
    return f"{verdict(met):6s} {text}"


def add_strict(parser: argparse.ArgumentParser) -> None:
    """Adds the flag. A figure of a busy computer is no failure unless it is asked for."""
    parser.add_argument("--strict", action="store_true", help="exit code 1 if an aim is missed")


def exit_code(lines: Iterable[str], *, strict: bool) -> int:
    """1 if one of `lines` is of an aim that was missed, and that is an error."""
    return int(strict and any(text.startswith(MISSED) for text in lines))
