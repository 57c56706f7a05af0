"""Runs of a proof never write where the job does, nor where another run has."""

from __future__ import annotations

from pathlib import Path

from megatron.resilience.proof.saves import saving_to

FOLDER = Path("proof/again")


def test_each_run_saves_for_itself_and_loads_what_the_job_loads() -> None:
    script = ("x.py", "--load", "job", "--save", "job", "--save-interval", "3", "--save=job")
    assert saving_to(script, FOLDER) == (
        *("x.py", "--load", "job", "--save", "proof/again", "--save-interval", "3", "--save=proof/again"),
    )


def test_a_job_that_saves_nothing_or_names_no_folder_stays_as_it_is() -> None:
    for script in ((), ("x.py", "--save-interval", "3"), ("x.py", "--save")):
        assert saving_to(script, FOLDER) == script
