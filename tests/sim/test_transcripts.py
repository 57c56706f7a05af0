"""Scenarios as text: compared word for word, written anew with `pytest tests/sim --write-transcripts`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.scenarios import SCENARIOS, play

FOLDER = Path(__file__).parents[1] / "transcripts"

ENDS = {
    "joiner_dies_after_leave": (0, 0, False),
    "leaver_dies_at_the_boundary": (0, 1, False),
    "joiner_dies_building": (1, 1, True),
    "joiner_dies_ready": (1, 1, True),
    "joiner_dies_at_the_boundary": (1, 1, True),
    "other_model": (1, 1, True),
    "little_room": (1, 1, True),
    "refused": (0, 0, True),
    "there_and_back": (2, 0, True),
    "queued": (2, 0, True),
}
"""(switches done, aborted, whether the job ended well); (1, 0, True) where nothing is said."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_comes_to_its_end_as_written_down(name: str, request: pytest.FixtureRequest) -> None:
    job, lines = play(name)
    outcomes = [incident.outcome for incident in job.controller.ledger.incidents.values()]
    came_to = outcomes.count("done"), outcomes.count("aborted"), job.controller.ledger.ended_ok
    assert came_to == ENDS.get(name, (1, 0, True))
    text = "\n".join(lines) + "\n"
    path = FOLDER / f"{name}.txt"
    if request.config.getoption("--write-transcripts"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "if it should be so, run pytest tests/sim --write-transcripts"


def test_no_transcript_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(SCENARIOS)
