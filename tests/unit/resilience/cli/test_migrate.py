"""The one line that tells what a migration cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.resilience.cli.main import main
from megatron.resilience.cli.migrate import bytes_text, describe_parts
from megatron.resilience.controller.client import ControllerClient
from megatron.resilience.protocol.incidents import Incident, Phase
from megatron.resilience.protocol.messages import Accepted, UserAnswer
from tests.unit.resilience.cli.finished import ENDED, STARTED, make

INCIDENT = Incident(
    incident_id="g2",
    kind="migration",
    outcome="done",
    why="",
    leavers=("machine-1",),
    joiners=("machine-4",),
    reasons=("the only machine that is free and fits",),
    slots=(1,),
    generation=2,
    boundary=41,
    phases=(
        Phase(name="start joiner", start_ms=0.0, duration_ms=812.4, overlapped=True),
        Phase(name="hand over", start_ms=812.4, duration_ms=120.0, overlapped=False),
        Phase(name="first iteration", start_ms=932.4, duration_ms=310.0, overlapped=False),
    ),
    downtime_ms=12.3,
    lost_ms=-4.0,
    links_kept=30,
    links_replaced=12,
    bytes_moved=4_200_000,
    ranks_measured=8,
)


def test_parts_tell_phases_links_and_bytes() -> None:
    assert describe_parts(INCIDENT) == (
        " (start joiner 812 ms overlapped, hand over 120 ms, first iteration 310 ms; 12 links replaced, 30 kept, "
        "4.2 MB moved)"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (4_200_000, "4.2 MB"), (7 * 10**9, "7.0 GB"), (10**13, "10.0 TB")],
)
def test_bytes_are_written_for_people(number: int, text: str) -> None:
    assert bytes_text(number) == text


def test_migration_of_a_job_that_is_over_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "r", STARTED, ENDED)
    assert main(["migrate", "--from", "machine-1", "--resilience-dir", str(tmp_path / "r")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "refused: the job failed at " in said.err


def test_migration_hears_of_the_end_while_it_asks_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make(tmp_path / "r", STARTED)

    def sleep(seconds: float) -> None:
        directory.journal.unlink()
        make(tmp_path / "r", STARTED, ENDED)

    monkeypatch.setattr("megatron.resilience.controller.client.time.sleep", sleep)
    assert main(["migrate", "--from", "machine-1", "--resilience-dir", str(tmp_path / "r")]) == 1
    said = capsys.readouterr()
    assert said.out == "trainmover: the controller does not answer; asking again\n"
    assert "error: the job failed at " in said.err


def test_ctrl_c_leaves_the_migration_to_itself_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: ControllerClient, *_: object, **__: object) -> Iterator[UserAnswer]:
        yield Accepted(command_id="c", text="begins")
        raise KeyboardInterrupt

    monkeypatch.setattr(ControllerClient, "ask", interrupted)
    make(tmp_path / "r", STARTED)
    assert main(["migrate", "--from", "machine-1", "--resilience-dir", str(tmp_path / "r")]) == 130
    assert "the migration goes on; see `trainmover status`" in capsys.readouterr().err
