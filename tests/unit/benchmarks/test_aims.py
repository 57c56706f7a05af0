"""What is missed is said, and is an error only if asked for."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import aims


def test_a_line_opens_with_its_verdict() -> None:
    assert [aims.line(met, "text") for met in (True, False)] == ["met    text", "MISSED text"]


@pytest.mark.parametrize(
    ("marks", "words", "code"),
    [
        ([True, True], ["--strict"], 0),
        ([True, False], ["--strict"], 1),
        ([True, False], [], 0),
        ([], ["--strict"], 0),
    ],
)
def test_a_missed_aim_is_an_error_if_asked_for(marks: list[bool], words: list[str], code: int) -> None:
    parser = argparse.ArgumentParser()
    aims.add_strict(parser)
    lines = [aims.line(met, "MISSED in the text is no verdict") for met in marks]
    assert aims.exit_code(lines, strict=parser.parse_args(words).strict) == code
