"""The facts of a process are those that change bits, and say so when they differ."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from megatron.resilience.protocol.facts import NAMES, Facts, differences
from megatron.resilience.worker.facts import TEXT_CHARACTERS_MAX, bounded, local_facts


def facts(**changes: Any) -> Facts:
    told: dict[str, Any] = {
        "settings": ["--num-layers=2"],
        "model_digest": "d",
        "data": ["--mock-data=on"],
        "script": "train.py=1",
    }
    return local_facts(**{**told, **changes})


def test_every_fact_is_known_and_one_process_agrees_with_itself() -> None:
    ours = facts()
    assert [name for name in Facts.__struct_fields__ if not getattr(ours, name)] == []
    assert differences(ours, facts()) == ()


def test_another_model_is_another_fact() -> None:
    told = differences(facts(settings=["--num-layers=2"]), facts(settings=["--num-layers=3"], model_digest="e"))
    assert len(told) == 1
    assert told[0].startswith("model configuration: found --num-layers=2, the job runs --num-layers=3 ")


def test_the_number_of_threads_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert facts().threads == "7"


@pytest.mark.parametrize("name", list(NAMES))
def test_each_fact_is_compared(name: str) -> None:
    ours = facts()
    (told,) = differences(msgspec.structs.replace(ours, **{name: "another"}), ours)
    assert told.startswith(f"{NAMES[name]}: found ")


def test_another_build_of_torch_is_told_by_the_property_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, shown = facts(), torch.__config__.show()
    monkeypatch.setattr(torch.__config__, "show", lambda: shown.replace("USE_OPENMP=ON", "USE_OPENMP=OFF"))
    (told,) = differences(facts(), ours)
    assert told.startswith("math library: found USE_OPENMP=OFF, the job runs USE_OPENMP=ON (")


def test_a_fact_of_many_lines_is_bounded_and_what_is_left_out_counts() -> None:
    lines = [f"--data-path {number} text.idx={number} bytes" for number in range(1000)]
    text = bounded(lines)
    assert len(text) < TEXT_CHARACTERS_MAX + 60
    assert text.splitlines()[:100] == lines[:100]
    assert bounded([*lines[:-1], "another"]) != text
    assert bounded(lines[:3]) == "\n".join(lines[:3])


def test_variables_of_the_process_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = facts()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    (told,) = differences(facts(), ours)
    assert told.startswith("variables of the environment: found MKL_CBWR=COMPATIBLE, ")


def test_another_result_of_a_small_calculation_is_another_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, softmax = facts(), torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda values, dim: softmax(values, dim) * 2)
    (told,) = differences(facts(), ours)
    assert told.startswith("arithmetic: found CPU float32 softmax=")
    assert "both have the processor" in told
