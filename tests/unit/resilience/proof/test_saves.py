"""Runs of a proof never write where the job does, nor where another run has."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.resilience.proof.saves import saving_to
from megatron.training.arguments import parse_settings

FOLDER = Path("proof/again")


def test_each_run_saves_for_itself_and_loads_what_the_job_loads() -> None:
    script = ("x.py", "--load", "job", "--save", "job", "--save-interval", "3", "--save=job")
    assert saving_to(script, FOLDER) == (
        *("x.py", "--load", "job", "--save", "proof/again", "--save-interval", "3", "--save=proof/again"),
    )


def test_a_job_that_saves_nothing_or_names_no_folder_stays_as_it_is() -> None:
    for script in ((), ("x.py", "--save-interval", "3"), ("x.py", "--save")):
        assert saving_to(script, FOLDER) == script


@pytest.mark.parametrize("text", ["save: job", "checkpoint: {save: job}", "{train_iters: 3, save: /job}"])
def test_a_folder_that_only_the_yaml_file_names_is_written_to_by_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    for words in (("--yaml-cfg", str(tmp_path / "job.yaml")), (f"--yaml-cfg={tmp_path / 'job.yaml'}",)):
        assert saving_to(("x.py", *words), FOLDER) == ("x.py", *words, "--save", "proof/again")
        own = ("x.py", *words, "--save", "job")
        assert saving_to(own, FOLDER) == ("x.py", *words, "--save", "proof/again")


def test_what_a_run_saves_to_is_what_the_trainer_reads(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("checkpoint: {save: job, save-interval: 3}")
    script = saving_to(("x.py", "--yaml-cfg", str(tmp_path / "job.yaml")), FOLDER)
    assert parse_settings(script[1:]).checkpoint.save == "proof/again"


def test_a_yaml_file_that_saves_nothing_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("save_interval: 3\nsave:\n")
    script = ("x.py", "--yaml-cfg", str(tmp_path / "job.yaml"))
    assert saving_to(script, FOLDER) == script
