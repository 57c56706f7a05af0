"""Facts that change bits: each is compared, what is not known is not, and what differs can be read."""

from __future__ import annotations

import msgspec
import pytest

from megatron.resilience.protocol.facts import NAMES, SHOWN_CHARACTERS_MAX, Facts, contrast_of, differences

JOB = Facts(**dict.fromkeys(Facts.__struct_fields__, "x"))
SHOWN_ONLY = {"settings"}


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
        ("MKL 1", "MKL 1\nMKL 2", "found nothing there, the job runs MKL 2"),
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
