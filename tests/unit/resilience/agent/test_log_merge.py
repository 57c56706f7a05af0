"""Bytes to lines, lines to one log."""

from __future__ import annotations

import random

import pytest

from megatron.resilience.agent.log_merge import LineSplitter, WarningFolder, parse_prefix, prefix


def split(*pieces: bytes, line_bytes_max: int = 100) -> list[str]:
    splitter = LineSplitter(line_bytes_max)
    return [line for piece in pieces for line in splitter.feed(piece)] + splitter.flush()


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\nc"], ["ab", "c"]),
        ([b"\n\n"], ["", ""]),
        ([b"a\r\nb\r", b"\nc\n"], ["a", "b", "c"]),
        ([b"10%\r20%\r", b"30%\rdone\n"], ["done"]),
        ([b"10%\r20%\r"], ["20%"]),
        ([b"caf\xc3", b"\xa9\n"], ["caf\u00e9"]),
        ([b"a\xff\xfeb\n"], ["a\ufffd\ufffdb"]),
        ([], []),
    ],
)
def test_lines_are_whole(pieces: list[bytes], lines: list[str]) -> None:
    assert split(*pieces) == lines


def test_cuts_do_not_matter() -> None:
    chance = random.Random(7)
    text = b"one\ntwo\r\nthree\xc3\xa9\n\n10%\r20%\rfour\n" + b"y" * 250 + b"\nfive"
    whole = split(text)
    for _ in range(200):
        at = sorted(chance.randrange(len(text)) for _ in range(chance.randrange(1, 12)))
        assert split(*(text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True))) == whole


@pytest.mark.parametrize("pieces", [[b"x" * 250 + b"\nnext\n"], [b"x" * 60] * 4 + [b"xx", b"xxxxxxxx\nnext\n"]])
def test_long_line_is_cut_once_and_says_so(pieces: list[bytes]) -> None:
    assert split(*pieces) == ["x" * 100 + " ... (cut after 100 bytes)", "next"]


def test_pending_text_is_bounded_however_long_the_progress_bar() -> None:
    splitter = LineSplitter(100)
    for number in range(1000):
        assert splitter.feed(f"\r{number}%".encode()) == []
    assert splitter.flush() == ["999%"]


@pytest.mark.parametrize(
    ("world_size", "text"), [(8, "[rank 3] "), (10, "[rank 3] "), (11, "[rank  3] "), (128, "[rank   3] ")]
)
def test_prefix_is_as_wide_for_every_rank_and_comes_off_again(world_size: int, text: str) -> None:
    assert prefix(3, world_size) == text
    assert len({len(prefix(global_rank, world_size)) for global_rank in range(world_size)}) == 1
    for line in ("", "plain", "  indented [rank 7] "):
        assert parse_prefix(text + line) == (3, line)


def test_line_without_prefix_is_nobodys() -> None:
    assert parse_prefix("Traceback") == (None, "Traceback")


def test_warning_of_all_ranks_is_shown_once_and_each_ranks_own_repetition_always() -> None:
    folder = WarningFolder()
    text = "a.py:7: UserWarning: slow"
    assert [folder.shows(global_rank, text) for global_rank in (2, 0, 1, 2, 0)] == [True, False, False, True, False]
    assert folder.folded == 3


def test_lines_that_are_no_warnings_are_never_folded() -> None:
    folder = WarningFolder()
    assert all(folder.shows(global_rank, "loaded the checkpoint") for global_rank in range(4))


def test_folder_remembers_a_bounded_number() -> None:
    folder = WarningFolder(remembered_max=2)
    for name in ("a", "b", "c"):
        assert folder.shows(0, f"{name}: UserWarning")
    assert folder.shows(1, "a: UserWarning")
    assert not folder.shows(1, "c: UserWarning")
