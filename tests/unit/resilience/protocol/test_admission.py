"""Agents of another job, or of another shape."""

from __future__ import annotations

import msgspec
import pytest

from megatron.resilience.protocol.admission import not_ours
from megatron.resilience.protocol.controller_words import JobSpec
from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.messages import AgentHello

SPEC = JobSpec(job="night", slots=2, ranks_per_machine=4)
OURS = AgentHello(
    machine_id="m0",
    incarnation=1,
    job="night",
    machines=2,
    ranks_per_machine=4,
    capacity=Capacity(ranks=4, memory_bytes=1),
    facts=Facts(),
)
SMALL = Capacity(ranks=3, memory_bytes=1)


def test_ours_and_what_is_larger_or_elastic_may_come() -> None:
    assert not_ours(OURS, SPEC) == ""
    assert not_ours(msgspec.structs.replace(OURS, capacity=Capacity(ranks=9, memory_bytes=1)), SPEC) == ""
    assert not_ours(msgspec.structs.replace(OURS, capacity=SMALL, elastic=True), SPEC) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"job": "nightly"}, "found job nightly on machine m0, expected job night; set TRAINMOVER_JOB"),
        ({"machines": 20}, "found --machines 20 on machine m0, expected --machines 2; pass that"),
        ({"ranks_per_machine": 2}, "found --ranks-per-machine 2 on machine m0, expected --ranks-per-machine 4"),
        ({"capacity": SMALL}, "found room for 3 ranks on machine m0, expected room for 4 ranks"),
    ],
)
def test_others_are_told_what_was_found_and_expected(changes: dict[str, object], why: str) -> None:
    assert why in not_ours(msgspec.structs.replace(OURS, **changes), SPEC)
