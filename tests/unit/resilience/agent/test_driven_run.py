"""A run that a program drives: read as it goes, waited for with a bound, and never left behind. Real launchers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron.resilience.agent.driven_run import DrivenRun, RunError, RunRefusedError, driven_run

FLAGS = ("--machines", "1", "--ranks-per-machine", "1", "--start", "exec")
LIMIT_S = 60.0


def script(folder: Path, text: str) -> list[str]:
    path = folder / "job.py"
    path.write_text(text, encoding="utf-8")
    return [str(path), "word"]


def flags(folder: Path) -> list[str]:
    return [*FLAGS, "--log-dir", str(folder / "logs")]


def soon() -> float:
    return time.monotonic() + LIMIT_S


def is_gone(run: DrivenRun) -> bool:
    return run.process.poll() is not None


def test_output_is_kept_and_each_line_has_its_time(tmp_path: Path) -> None:
    text = "import sys\nprint('first', sys.argv[1], flush=True)\nprint('second')\n"
    log = tmp_path / "run.log"
    before_s = time.time()
    with driven_run(flags(tmp_path), script(tmp_path, text), log) as run:
        run.wait(soon())
        first_s, second_s = run.first_line_s("first word"), run.first_line_s("second")
    assert first_s is not None
    assert second_s is not None
    assert before_s < first_s <= second_s < time.time()
    assert run.first_line_s("third") is None
    assert "first word" in log.read_text(encoding="utf-8")


def test_a_run_that_fails_is_an_error_with_the_end_of_its_output(tmp_path: Path) -> None:
    text = "print('last words', flush=True)\nraise SystemExit(3)\n"
    with (
        driven_run(flags(tmp_path), script(tmp_path, text), tmp_path / "run.log") as run,
        pytest.raises(RunError, match=r"found exit code 1, expected 0; its output \((.|\n)*last words"),
    ):
        run.wait(soon())


def test_the_end_before_what_was_waited_for_is_an_error(tmp_path: Path) -> None:
    with (
        driven_run(flags(tmp_path), script(tmp_path, "print('short')\n"), tmp_path / "run.log") as run,
        pytest.raises(RunError, match=r"found the job's end before rain;(.|\n)*short"),
    ):
        run.wait_for(lambda: False, soon(), "rain")


def test_a_run_that_refuses_its_command_line_is_told_apart_by_its_last_line(tmp_path: Path) -> None:
    job = script(tmp_path, "raise SystemExit(2)\n")
    with driven_run([*flags(tmp_path), "--machines", "0"], job, tmp_path / "run.log") as run:
        with pytest.raises(RunRefusedError) as caught:
            run.wait_for(lambda: False, soon(), "rain")
        with pytest.raises(RunRefusedError):
            run.wait(soon())
    assert caught.value.line.startswith("trainmover: error: found --machines 0, expected at least 1")


def test_waiting_is_bounded_and_the_run_ends_with_its_driver(tmp_path: Path) -> None:
    text = "import threading\nprint('here', flush=True)\nthreading.Event().wait()\n"
    with driven_run(flags(tmp_path), script(tmp_path, text), tmp_path / "run.log") as run:
        run.wait_for(lambda: run.first_line_s("here") is not None, soon(), "its first line")
        with pytest.raises(RunError, match="found no sign of rain within the limit"):
            run.wait_for(lambda: False, time.monotonic(), "rain")
        with pytest.raises(RunError, match="found no sign of its end within the limit"):
            run.wait(time.monotonic())
        assert not is_gone(run)
    assert is_gone(run)
