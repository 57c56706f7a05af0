"""The facts of a process are those that change bits, and say so when they differ."""

from __future__ import annotations

import msgspec
import pytest
import torch

from megatron.resilience.protocol.facts import NAMES, differences
from megatron.resilience.worker.facts import local_facts


def test_every_fact_is_known_and_one_process_agrees_with_itself() -> None:
    facts = local_facts(model_configuration="--num-layers 2")
    assert [name for name in NAMES if not getattr(facts, name)] == []
    assert differences(facts, local_facts(model_configuration="--num-layers 2")) == ()


def test_another_model_is_another_fact() -> None:
    told = differences(
        local_facts(model_configuration="--num-layers 2"), local_facts(model_configuration="--num-layers 3")
    )
    assert len(told) == 1
    assert told[0].startswith("model configuration: found ")


def test_the_number_of_threads_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert local_facts(model_configuration="").threads == "7"


@pytest.mark.parametrize("name", list(NAMES))
def test_each_fact_is_compared(name: str) -> None:
    facts = local_facts(model_configuration="")
    told = differences(msgspec.structs.replace(facts, **{name: "another"}), facts)
    assert told == (f"{NAMES[name]}: found another, the job runs {getattr(facts, name)}",)
