"""`trainmover prove`: what it refuses, what it prints, and how it ends, whatever the proof says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.resilience.agent.driven_run import RunError
from megatron.resilience.cli import prove as module
from megatron.resilience.cli.prove import main
from megatron.resilience.cli.usage import UsageError
from megatron.resilience.proof.compare import Difference
from megatron.resilience.proof.operations import OperationDifference
from megatron.resilience.proof.planned import Outcome, ProofSpec, Verdict
from megatron.resilience.proof.schedule import Move

INCIDENT = {"slots": [0, 2], "boundary": 31, "downtime_ms": 12.34, "outcome": "done"}
EQUAL = Verdict(outcome=Outcome.EQUAL, iterations=40, incidents=(INCIDENT,))
DIFFERENCE = Difference(iteration=32, what="lm loss", expected=2.5, found=2.75)
OPERATION = OperationDifference(
    iteration=31,
    global_rank=2,
    operation="all_reduce",
    number=7,
    global_ranks=(2, 3),
    bytes=64,
    how="it was given other values",
    at_ns=5,
)
DIFFERENT = Verdict(
    outcome=Outcome.DIFFERENT,
    why=str(DIFFERENCE),
    difference=DIFFERENCE,
    operation=OPERATION,
    iterations=40,
    incidents=(INCIDENT,),
)
NONE = Verdict(outcome=Outcome.NONE, why="two untouched runs differ")

Proves = Callable[[Verdict], list[ProofSpec]]


@pytest.fixture
def proves(monkeypatch: pytest.MonkeyPatch) -> Proves:
    """Puts a verdict in the place of a proof, and gives the proofs that were asked for."""

    def put(verdict: Verdict) -> list[ProofSpec]:
        asked: list[ProofSpec] = []

        def prove(spec: ProofSpec, say: Callable[[str], None]) -> Verdict:
            asked.append(spec)
            return verdict

        monkeypatch.setattr(module, "prove", prove)
        return asked

    return put


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["unplanned", "--", "x.py"], "found 'unplanned', expected planned"),
        (["planned"], "found no script"),
        (["planned", "--machines", "0", "--", "x.py"], "found --machines 0, expected at least 1"),
        (["planned", "--ranks-per-machine", "-1", "--", "x.py"], "found --ranks-per-machine -1"),
        (["planned", "--limit", "0", "--", "x.py"], "found --limit 0, expected seconds, more than 0"),
        (["planned", "--limit", "nan", "--", "x.py"], "found --limit nan"),
        (["planned", "--limit", "inf", "--", "x.py"], "found --limit inf"),
        (["planned", "--", "x.py", "--metrics-file", "m"], "found --metrics-file in the script's arguments"),
        (["planned", "--", "x.py", "--metrics-file=m"], "found --metrics-file in the script's arguments"),
        (["planned", "--", "x.py", "--log-state-digest"], "found --log-state-digest in the script's arguments"),
        (["planned", "--migrate", "10", "--", "x.py"], "expected ITERATION:SLOT"),
        (["planned", "--migrate", "10:2", "--", "x.py"], "found slot 2"),
        (["planned", "--window", "5", "--", "x.py"], "found --window without --load"),
        (["planned", "--speed", "5", "--", "x.py"], "--speed"),
    ],
)
def test_what_cannot_be_proved_is_refused_before_anything_runs(proves: Proves, words: list[str], expected: str) -> None:
    asked = proves(EQUAL)
    with pytest.raises(UsageError, match=expected):
        main(words)
    assert asked == []


def test_the_proof_is_of_the_job_that_was_named(proves: Proves, tmp_path: Path) -> None:
    asked = proves(EQUAL)
    flags = ["--machines", "3", "--ranks-per-machine", "2", "--migrate", "9:2", "--migrate", "5:0,1", "--limit", "77"]
    assert main(["planned", *flags, "--folder", str(tmp_path / "new"), "--", "x.py", "--lr", "1"]) == 0
    assert asked == [
        ProofSpec(
            script=("x.py", "--lr", "1"),
            machines=3,
            ranks_per_machine=2,
            moves=(Move(iteration=5, slots=(0, 1)), Move(iteration=9, slots=(2,))),
            folder=tmp_path / "new",
            limit_s=77.0,
        )
    ]
    assert (tmp_path / "new").is_dir(), "a folder that was named is kept"


def test_a_folder_that_holds_anything_is_refused(proves: Proves, tmp_path: Path) -> None:
    asked = proves(EQUAL)
    (tmp_path / "untouched.jsonl").write_text("")
    for folder, words in (
        (tmp_path, "found files in --folder .*, expected an empty folder or none yet"),
        (tmp_path / "untouched.jsonl", r"not usable \(File exists\)"),
        (tmp_path / "untouched.jsonl" / "under", r"not usable \(Not a directory\)"),
    ):
        with pytest.raises(UsageError, match=words):
            main(["planned", "--folder", str(folder), "--", "x.py"])
    assert asked == []
    assert [path.name for path in tmp_path.iterdir()] == ["untouched.jsonl"]


@pytest.mark.parametrize(
    ("verdict", "code", "words"),
    [
        (EQUAL, 0, "to the last bit. Moved: slot 0+2 at iteration 31 (downtime 12.3 ms)."),
        (
            DIFFERENT,
            1,
            "DIFFERENT: iteration 32: lm loss is 2.75, expected 2.5. The first operation that differs: in iteration "
            "31, on global rank 2, all_reduce number 7 among global ranks 2, 3 (64 bytes): it was given other values. "
            "Logs and metrics: ",
        ),
        (NONE, 1, "NO VERDICT: two untouched runs differ. Logs and metrics: "),
    ],
)
def test_each_verdict_has_its_words_and_exit_code(
    proves: Proves, capsys: pytest.CaptureFixture[str], tmp_path: Path, verdict: Verdict, code: int, words: str
) -> None:
    proves(verdict)
    assert main(["planned", "--folder", str(tmp_path), "--", "x.py"]) == code
    assert words in capsys.readouterr().out


def test_json_tells_all_of_it(proves: Proves, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    proves(DIFFERENT)
    assert main(["planned", "--json", "--folder", str(tmp_path), "--", "x.py"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "verdict": "different",
        "why": str(DIFFERENCE),
        "iterations": 40,
        "first_difference": {"iteration": 32, "what": "lm loss", "expected": 2.5, "found": 2.75},
        "first_operation": {
            "iteration": 31,
            "global_rank": 2,
            "operation": "all_reduce",
            "number": 7,
            "global_ranks": [2, 3],
            "bytes": 64,
            "how": "it was given other values",
            "at_ns": 5,
        },
        "incidents": [INCIDENT],
    }


def test_only_the_folder_of_an_equal_proof_goes_away(
    proves: Proves, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for verdict, kept in ((EQUAL, 0), (DIFFERENT, 1), (NONE, 2)):
        asked = proves(verdict)
        main(["planned", "--", "x.py"])
        assert asked[0].folder.parent == tmp_path
        assert len(list(tmp_path.iterdir())) == kept


def test_a_job_that_fails_gives_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def prove(spec: ProofSpec, say: Callable[[str], None]) -> Verdict:
        raise RunError("found exit code 1, expected 0")

    monkeypatch.setattr(module, "prove", prove)
    assert main(["planned", "--folder", str(tmp_path), "--", "x.py"]) == 1
    assert "NO VERDICT: found exit code 1, expected 0." in capsys.readouterr().out


def test_a_job_that_records_nothing_gives_no_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text("print('trained')\n", encoding="utf-8")
    assert main(["planned", "--machines", "1", "--folder", str(tmp_path / "proof"), "--", str(script)]) == 1
    assert "NO VERDICT: found no step in the metrics, expected one an iteration" in capsys.readouterr().out


@pytest.mark.parametrize("is_named", [False, True])
def test_a_job_that_cannot_start_is_a_wrong_command_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, is_named: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "named").mkdir()
    named = ["--folder", str(tmp_path / "named")] if is_named else []
    assert main(["planned", *named, "--", "missing.py"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "trainmover: error: found no file missing.py, expected the training script; check the path after `--`"
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["named"]
