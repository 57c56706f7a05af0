"""What is read from a script that is never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.resilience.agent.script import ScriptFacts, read_script_facts


def facts(directory: Path, text: str) -> ScriptFacts:
    path = directory / "script.py"
    path.write_text(text)
    return read_script_facts(path)


@pytest.mark.parametrize(
    "text", ['PRELOAD = ("a", "b.c")', 'PRELOAD: tuple[str, ...] = ("a", "b.c")', 'PRELOAD = ["a", "b.c"]']
)
def test_literal_preload_is_read(tmp_path: Path, text: str) -> None:
    assert facts(tmp_path, text).preload == ("a", "b.c")


@pytest.mark.parametrize("text", ["", 'def f():\n    PRELOAD = ("a",)', "PRELOAD: tuple[str, ...]"])
def test_without_a_top_level_value_nothing_is_preloaded(tmp_path: Path, text: str) -> None:
    assert facts(tmp_path, text).preload == ()


@pytest.mark.parametrize("text", ["PRELOAD = names()", 'PRELOAD = "torch"', "PRELOAD = (1,)", 'PRELOAD = {"a": 1}'])
def test_preload_that_is_no_literal_tuple_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="line 2: PRELOAD"):
        facts(tmp_path, "\n" + text)


def test_preflight_counts_only_at_top_level(tmp_path: Path) -> None:
    assert facts(tmp_path, "def preflight(): ...").has_preflight
    assert not facts(tmp_path, "class A:\n    def preflight(self): ...").has_preflight


def test_script_is_not_run(tmp_path: Path) -> None:
    facts(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert not (tmp_path / "ran").exists()


def test_syntax_error_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2"):
        facts(tmp_path, "\nx = = 1")
