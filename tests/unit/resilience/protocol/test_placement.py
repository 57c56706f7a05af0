"""Which machine takes a slot, and what the user reads about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.placement import Candidate, Need, natural, obstacle, place

NEED = Need(ranks=2, memory_bytes=100, facts=Facts(torch="2"))
GOOD = Candidate(
    machine_id="m5",
    rack="a",
    attached=True,
    busy="",
    failures=0,
    idle_since_ms=10.0,
    capacity=Capacity(ranks=2, memory_bytes=100),
    facts=Facts(torch="2"),
)


def test_same_rack_comes_before_health_and_idleness() -> None:
    near = replace(GOOD, machine_id="m9", failures=3, idle_since_ms=99.0)
    far = replace(GOOD, machine_id="m6", rack="b", idle_since_ms=0.0)
    chosen = place([far, near], NEED, rack="a")
    assert (chosen.machine_id, chosen.reason) == ("m9", "the only one in rack a")
    assert place([far, near], NEED, rack="").machine_id == "m6"


def test_then_health_then_longest_idle_then_name() -> None:
    weak = replace(GOOD, machine_id="m1", failures=1, idle_since_ms=0.0)
    rested = replace(GOOD, machine_id="m7", idle_since_ms=5.0)
    chosen = place([weak, GOOD, rested], NEED, rack="a")
    assert (chosen.machine_id, chosen.reason) == ("m7", "same rack a, longest idle")
    assert place([weak, GOOD], NEED, rack="").reason == "best health"
    twin = replace(GOOD, machine_id="m10")
    assert place([twin, GOOD], NEED, rack="").machine_id == "m5"
    assert place([twin, GOOD], NEED, rack="").reason == "first by name among equals"


def test_the_machine_that_is_asked_for_is_taken_or_none() -> None:
    other = replace(GOOD, machine_id="m6", idle_since_ms=0.0)
    assert place([GOOD, other], NEED, rack="a", wanted="m5").reason == "asked for"
    assert place([GOOD], NEED, rack="a", wanted="m8").reason == "machine m8 is unknown"
    busy = replace(GOOD, busy="it holds slot 1")
    chosen = place([busy, other], NEED, rack="a", wanted="m5")
    assert (chosen.machine_id, chosen.reason) == (None, "m5: it holds slot 1")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"busy": "it holds slot 3"}, "it holds slot 3"),
        ({"attached": False}, "its agent is not connected"),
        ({"capacity": Capacity(ranks=1, memory_bytes=100)}, "it holds 1 ranks, the slot has 2"),
        ({"capacity": Capacity(ranks=2, memory_bytes=99)}, "it has 99 bytes of memory, the slot needs 100"),
        ({"facts": Facts(torch="3")}, "torch: found 3, the job runs 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(change: dict[str, object], why: str) -> None:
    unfit = replace(GOOD, **change)  # type: ignore[arg-type]
    assert why in obstacle(unfit, NEED)
    assert why in place([unfit], NEED, rack="a").reason
    assert place([unfit], NEED, rack="a").machine_id is None


def test_one_that_fits_is_the_only_one_and_none_is_said_so() -> None:
    assert place([GOOD], NEED, rack="b").reason == "the only machine that is free and fits"
    assert place([], NEED, rack="a").reason == "no machine beside those of the job is known"


def test_names_sort_by_their_numbers() -> None:
    assert sorted(["m10", "m2", "2", "a1b10", "a1b9"], key=natural) == ["2", "a1b9", "a1b10", "m2", "m10"]
