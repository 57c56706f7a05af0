"""Facts that change bits: each is compared, what is not known is not, and what differs can be read."""

from __future__ import annotations

import msgspec
import pytest

from megatron.resilience.protocol.facts import NAMES, SHOWN_CHARACTERS_MAX, Facts, contrast_of, differences

JOB = Facts(**dict.fromkeys(Facts.__struct_fields__, "x"))
SHOWN_ONLY = {"settings", "processor"}


@pytest.mark.parametrize("name", Facts.__struct_fields__)
def test_each_fact_is_compared_and_named(name: str) -> None:
    told = differences(msgspec.structs.replace(JOB, **{name: "y"}), JOB)
    if name in SHOWN_ONLY:
        assert told == ()
        return
    assert len(told) == 1
    assert told[0].startswith(f"{NAMES[name]}: found y, the job runs x (")


def test_equal_and_unknown_facts_do_not_differ() -> None:
    assert differences(JOB, JOB) == ()
    assert differences(Facts(), JOB) == ()
    assert differences(JOB, Facts(torch="x")) == ()


def test_another_model_is_told_by_the_first_setting_that_differs() -> None:
    job = Facts(model_digest="a", settings="--num-layers=4\n--swiglu=yes\nworld_size=2")
    joiner = Facts(model_digest="b", settings="--num-layers=3\nworld_size=2")
    (told,) = differences(joiner, job)
    assert told.startswith("model configuration: found --num-layers=3, the job runs --num-layers=4 (and 1 more) (")
    (told,) = differences(Facts(model_digest="b", settings=job.settings), job)
    assert told.startswith("model configuration: found b, the job runs a (")


@pytest.mark.parametrize(
    ("found", "expected", "told"),
    [
        ("2", "3", "found 2, the job runs 3"),
        ("a=1\nb=2", "a=1\nb=3", "found b=2, the job runs b=3"),
        ("a=1", "a=1\nb=3", "found no b, the job runs b=3"),
        ("a=1\nb=3", "a=1", "found b=3, the job runs no b"),
        ("MKL 1\nb=2", "MKL 2\nb=2", "found MKL 1, the job runs MKL 2"),
        ("none", "H200", "found none, the job runs H200"),
        ("MKL 1", "MKL 1\nMKL 2", "found none, the job runs MKL 2"),
        ("a=1\nb=2", "b=2\na=1", "found the same in another order"),
        ("a=1\nb=2", "a=1\nb=2", ""),
    ],
)
def test_the_first_line_that_differs_is_shown(found: str, expected: str, told: str) -> None:
    assert contrast_of(found, expected) == told


def test_long_lines_are_shown_from_where_they_differ() -> None:
    words = [f"-Wword{number}" for number in range(200)]
    ours, theirs = " ".join(words), " ".join([*words[:150], "-mavx512f", *words[150:]])
    told = contrast_of(f"flags={ours}", f"flags={theirs}")
    assert told.startswith("found ...-Wword150 -Wword151")
    assert ", the job runs ...-mavx512f -Wword150" in told
    assert len(told) < 2 * SHOWN_CHARACTERS_MAX + 50


def test_another_processor_is_told_only_where_it_computes_otherwise() -> None:
    job = Facts(processor="Xeon", arithmetic="CPU product=1\nCPU exp=2", cpu_capability="AVX512")
    other = msgspec.structs.replace(job, processor="EPYC")
    assert differences(other, job) == ()
    (told,) = differences(msgspec.structs.replace(other, arithmetic="CPU product=3\nCPU exp=2"), job)
    assert told.startswith("arithmetic: found CPU product=3, the job runs CPU product=1 (")
    assert told.endswith("; its processor is EPYC, the job's Xeon)")
    (told,) = differences(msgspec.structs.replace(job, arithmetic="CPU product=3"), job)
    assert told.endswith("; both have the processor Xeon)")
    (told,) = differences(msgspec.structs.replace(other, cpu_capability="AVX2"), job)
    assert told.endswith("; its processor is EPYC, the job's Xeon)")


def test_a_variable_that_one_side_lacks_is_named() -> None:
    (told,) = differences(Facts(variables="none"), Facts(variables="MKL_CBWR=AVX2"))
    assert told.startswith("variables of the environment: found no MKL_CBWR, the job runs MKL_CBWR=AVX2 (")
    (told,) = differences(Facts(variables="MKL_CBWR=AVX2"), Facts(variables="none"))
    assert told.startswith("variables of the environment: found MKL_CBWR=AVX2, the job runs no MKL_CBWR (")
