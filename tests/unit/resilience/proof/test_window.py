"""A proof over a few iterations: the job ends so many after its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.resilience.proof.window import window_flags


def checkpoint(folder: Path, text: str = "40\n") -> list[str]:
    (folder / "latest_checkpointed_iteration.txt").write_text(text)
    return ["pretrain_gpt.py", "--load", str(folder)]


def test_without_a_window_nothing_is_added(tmp_path: Path) -> None:
    assert window_flags(["pretrain_gpt.py"], None) == ()


@pytest.mark.parametrize("window", [2, 7, 41, 100])
def test_the_job_ends_a_window_after_its_checkpoint(tmp_path: Path, window: int) -> None:
    flag, interval = window_flags(checkpoint(tmp_path), window)
    ends = next(iteration for iteration in range(41, 400) if iteration % int(interval) == 0)
    assert (flag, ends) == ("--exit-interval", 40 + window)


def test_the_checkpoint_that_the_script_names_counts(tmp_path: Path) -> None:
    assert window_flags([*checkpoint(tmp_path), "--ckpt-step", "20"], 5) == ("--exit-interval", "25")


def test_the_checkpoint_may_be_named_in_any_way_that_the_trainer_takes(tmp_path: Path) -> None:
    flag, folder = checkpoint(tmp_path)[1:]
    (tmp_path / "job.yaml").write_text(f"checkpoint:\n  load: {folder}\n")
    (tmp_path / "step.yaml").write_text(f"load: {folder}\nckpt_step: 20\n")
    for words, end in (
        ([f"{flag}={folder}"], "45"),
        ([flag, "elsewhere", flag, folder], "45"),
        (["--yaml-cfg", str(tmp_path / "job.yaml")], "45"),
        (["--yaml-cfg", str(tmp_path / "step.yaml")], "25"),
        (["--yaml-cfg", str(tmp_path / "step.yaml"), "--ckpt-step=30"], "35"),
    ):
        assert window_flags(["x.py", *words], 5) == ("--exit-interval", end)


@pytest.mark.parametrize(
    ("window", "extra", "words"),
    [
        (5, ["--exit-interval=3"], "found --exit-interval in the script's arguments"),
        (5, ["--ckpt-step", "last"], "found --ckpt-step last, expected the iteration of a checkpoint"),
        (1, [], "found --window 1, expected at least 2"),
        (5, ["--exit-interval", "3"], "found --exit-interval in the script's arguments"),
    ],
)
def test_windows_that_prove_nothing_are_refused(tmp_path: Path, window: int, extra: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        window_flags([*checkpoint(tmp_path), *extra], window)


@pytest.mark.parametrize("text", ["", "release", None])
def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, text: str | None) -> None:
    script = ["pretrain_gpt.py", "--load", str(tmp_path)] if text is None else checkpoint(tmp_path, text)
    with pytest.raises(ValueError, match="expected a checkpoint folder"):
        window_flags(script, 5)
    with pytest.raises(ValueError, match="found --window without --load"):
        window_flags(["pretrain_gpt.py"], 5)
