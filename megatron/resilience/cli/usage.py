"""What a wrong command line is answered with: one line that says what was found, what was expected, and what to do."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn


class UsageError(Exception):
    """The user has to change the command line. The text is one line."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean --machines?` if one of `known` resembles `word`, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, and names the flag that an unknown one resembles."""

    def error(self, message: str) -> NoReturn:
        """What argparse calls for a bad value or a missing one."""
        raise UsageError(f"found {message}; see {self.prog} --help")

    def parse_flags(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses flags only. Raises UsageError for an unknown flag, or for what is no flag."""
        options, unknown = self.parse_known_args(arguments)
        if not unknown:
            return options
        word = unknown[0].split("=", 1)[0]
        if not word.startswith("-"):
            raise UsageError(
                f"found {word!r} among the flags, expected `--` before the script; run `{self.prog} ... -- SCRIPT ARGS`"
            )
        known = [flag for action in self._actions for flag in action.option_strings]
        raise UsageError(
            f"found unknown flag {word}{nearest(word, known) or f', expected one of {chr(32).join(sorted(known))}'}"
        )
