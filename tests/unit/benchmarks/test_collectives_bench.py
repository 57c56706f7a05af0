"""The benchmark as a user calls it: flags refused, a small run written, and nothing left when it is ended."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from benchmarks import collectives_bench
from benchmarks.collectives.cells import RANKS, SIZES
from benchmarks.collectives.job import ROOT
from benchmarks.collectives.verdict import Verdict
from benchmarks.collectives_bench import QUICK_RANKS, QUICK_SIZES, main, parse
from megatron.resilience.agent.process_tree import descendants, read_process, read_processes

LIMIT_S = 120
SMALL = ("--libraries", "gloo", "--ranks", "2", "--bytes", "1024", "--quick")
BENCH = (sys.executable, "benchmarks/collectives_bench.py", *SMALL)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "3"], "--ranks: found 3, expected an even number"),
        (["--ranks", "0"], "--ranks: found 0, expected an even number"),
        (["--ranks", "8", "--bytes", "1000"], "--bytes: found 1000, expected a multiple of 32"),
        (["--bytes", "0"], "--bytes: found 0, expected a multiple of 8"),
        (["--ops", "all_to_all"], "invalid choice: 'all_to_all'"),
        (["--libraries", "nccl"], "invalid choice: 'nccl'"),
    ],
)
def test_wrong_flags_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(["--libraries", "gloo", *words])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_open_mpi_is_asked_for_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse([])
    assert "pip install -r requirements/bench.txt" in capsys.readouterr().err


def test_quick_is_a_part_of_all() -> None:
    quick, full = parse(["--quick", "--libraries", "gloo"]), parse(["--libraries", "gloo"])
    assert (full.ranks, full.bytes) == (list(RANKS), list(SIZES))
    assert (quick.ranks, quick.bytes) == (list(QUICK_RANKS), list(QUICK_SIZES))
    assert set(quick.bytes) < set(SIZES)


def test_a_small_run_writes_what_the_schema_says(tmp_path: Path) -> None:
    result = tmp_path / "collectives.json"
    done = subprocess.run(
        [*BENCH, "--ops", "all_reduce", "send_recv", "--output", str(result)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(result.read_text(encoding="utf-8"))
    schema = json.loads((ROOT / "docs" / "schemas" / "collectives.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(written)
    assert [(row["op"], row["ranks"], row["bytes"]) for row in written] == [
        ("all_reduce", 2, 1024),
        ("send_recv", 2, 1024),
    ]
    assert "all_reduce" in done.stdout
    assert list(tmp_path.iterdir()) == [result]


def test_a_missed_aim_is_an_error_if_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missed = [Verdict(met=None, text="nothing is asked"), Verdict(met=False, text="0.1x")]
    monkeypatch.setattr(collectives_bench, "nothing_left", lambda: contextlib.nullcontext(tmp_path))
    monkeypatch.setattr(collectives_bench, "measure_ranks", lambda *_: None)
    monkeypatch.setattr(collectives_bench, "verdicts", lambda *_: missed)
    words = ["--quick", "--libraries", "gloo", "--output", str(tmp_path / "collectives.json")]
    assert [main(words), main([*words, "--strict"])] == [0, 1]
    missed.pop()
    assert main([*words, "--strict"]) == 0


def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        BENCH,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr
        assert "measuring" in process.stderr.readline()
        ranks = descendants(read_processes(), process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert len(ranks) == 2
        assert [read_process(record.pid) for record in ranks] == [None, None]
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)
