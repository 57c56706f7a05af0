"""Thousands of simulated jobs with faults drawn from a seed: no rule is broken, and nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sim.faults import LEVELS
from tests.sim.run import Outcome, Violation, main, simulate

ROOT = Path(__file__).parents[2]

SEEDS = 2_000
SEEDS_MIN = 1_000
LIMIT_S = 30.0
"""`make test` stops early on a slow computer, but not below SEEDS_MIN."""


def run_seeds(first: int, count: int, limit_s: float, least: int) -> list[Outcome]:
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    for seed in range(first, first + count):
        outcomes.append(simulate(seed))
        if time.monotonic() - begin > limit_s and len(outcomes) >= least:
            break
    return outcomes


def test_no_seed_breaks_a_rule() -> None:
    outcomes = run_seeds(0, SEEDS, LIMIT_S, SEEDS_MIN)
    assert len(outcomes) >= SEEDS_MIN
    # It would show nothing if hardly any switch came about, none came to nothing, or no controller died.
    assert sum(outcome.done for outcome in outcomes) > 0.4 * len(outcomes)
    assert sum(outcome.aborted for outcome in outcomes) > 0.1 * len(outcomes)
    assert sum(outcome.terms - 1 for outcome in outcomes) > 0.4 * len(outcomes)
    assert 0 < sum(bool(outcome.failed) for outcome in outcomes) < 0.2 * len(outcomes)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # it ends when its minutes are over
def test_no_seed_breaks_a_rule_for_as_long_as_told(request: pytest.FixtureRequest) -> None:
    minutes: float = request.config.getoption("--sim-minutes")
    first: int = request.config.getoption("--sim-first-seed")
    outcomes = run_seeds(first, 1 << 40, minutes * 60, 1)
    print(f"{len(outcomes)} seeds from {first}")
    assert sum(outcome.done for outcome in outcomes) > 0


def printed(seed: int, level: float, hash_seed: str) -> str:
    """What another process prints of a seed."""
    command = [sys.executable, "-m", "tests.sim.run", str(seed), str(level)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout


@pytest.mark.parametrize(("seed", "level"), [(17, 1.0), (19, 4.0)])
def test_a_seed_reproduces_line_by_line_in_any_process(seed: int, level: float) -> None:
    one = printed(seed, level, "1")
    assert one == printed(seed, level, "2")
    lines: list[str] = []
    ending = simulate(seed, (level,), lines=lines)
    assert one == "\n".join([*lines, str(ending)]) + "\n"
    assert any("SwitchLeft" in line for line in lines)


def test_a_violation_says_how_to_run_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron.resilience.protocol.leaver.may_leave", lambda half: True)
    for levels, named in (((4.0, 2.0), " 4.0 2.0"), (LEVELS, "")):
        said = ""
        for seed in range(200):
            try:
                simulate(seed, levels)
            except Violation as violation:
                said = str(violation)
                break
        command = said.rpartition("run it again with: ")[2]
        assert command == f"python -m tests.sim.run {seed}{named}"
        assert main(command.split()[3:]) == 1
        assert capsys.readouterr().out.endswith(said + "\n")


def test_what_is_no_violation_passes_through_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.resilience.protocol.leaver.may_leave", lambda half: half.no_such_field)
    with pytest.raises(AttributeError) as raised:
        run_seeds(0, 200, 60.0, 1)
    assert "run it again with: python -m tests.sim.run" in raised.value.__notes__[0]
