"""What a script's arguments set is read as the trainer reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.resilience.proof.script_settings import setting


def test_the_last_word_of_the_command_line_wins_over_the_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("checkpoint: {load: there, ckpt_step: 20}\nsave-interval: 7\n")
    script = ("x.py", "--yaml-cfg", str(tmp_path / "job.yaml"), "--load", "one", "--load=two")
    assert setting(script, "load") == "two"
    assert setting(script[:3], "load") == "there"
    assert setting(script, "ckpt-step") == "20"
    assert setting(script, "save-interval") == "7"
    assert setting(script, "save") is None
    assert setting(("x.py", "--load"), "load") is None


@pytest.mark.parametrize("content", [b"", b"a: [", b"[1]", b"\xff", b"load:", None])
def test_a_file_that_says_nothing_sets_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_bytes(content)
    assert setting(("x.py", "--yaml-cfg", str(path)), "load") is None
