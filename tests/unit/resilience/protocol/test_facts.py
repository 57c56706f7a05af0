"""Facts that change bits: every field is compared, what is not known is not."""

from __future__ import annotations

import msgspec
import pytest

from megatron.resilience.protocol.facts import NAMES, Facts, differences

JOB = Facts(**dict.fromkeys(Facts.__struct_fields__, "x"))


@pytest.mark.parametrize("name", Facts.__struct_fields__)
def test_each_fact_is_compared_and_named(name: str) -> None:
    told = differences(msgspec.structs.replace(JOB, **{name: "y"}), JOB)
    assert told == (f"{NAMES[name]}: found y, the job runs x",)


def test_equal_and_unknown_facts_do_not_differ() -> None:
    assert differences(JOB, JOB) == ()
    assert differences(Facts(), JOB) == ()
    assert differences(JOB, Facts(torch="x")) == ()
