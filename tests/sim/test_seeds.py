"""Thousands of simulated jobs with faults drawn from a seed: no rule is broken, and nobody waits for ever."""

from __future__ import annotations

import time

import pytest

from tests.sim.run import Outcome, Violation, simulate

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


def test_a_seed_reproduces_exactly() -> None:
    for seed in (11, 12, 13):
        assert simulate(seed) == simulate(seed)


def test_a_violation_says_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.resilience.protocol.leaver.may_leave", lambda half: True)
    said: list[str] = []
    for seed in range(200):
        try:
            simulate(seed)
        except Violation as violation:
            said.append(str(violation))
            with pytest.raises(Violation) as again:
                simulate(seed)
            assert str(again.value) == said[0]
            break
    assert said
    assert "python -m tests.sim.run" in said[0]
