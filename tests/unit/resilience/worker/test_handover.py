"""The place of a rank's links and its clock go over with its small state, unless its joiner could not go on from it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import trainmover_ext
from megatron.resilience.worker.handover import Handover


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """This process is rank 1 of 4, built alone; the names of its groups."""
    monkeypatch.setenv("TRAINMOVER_MODE", "isolated")
    dist.init_process_group("trainmover", store=HashStore(), rank=1, world_size=4)
    yield [stats["name"] for stats in trainmover_ext.communicator_stats()]
    dist.destroy_process_group()
    trainmover_ext.shutdown()


def test_what_one_rank_captures_another_takes_over() -> None:
    leaver, joiner = Handover(), Handover()
    assert joiner.capture()["text"] == ""
    leaver.text = '{"places": {}}'
    for iteration, at_s in enumerate((0.0, 0.010, 0.020), 1):
        leaver.meter.arrive(iteration, at_s)
    joiner.restore(leaver.capture())
    assert joiner.text == leaver.text
    assert joiner.meter.median_ms() == pytest.approx(10.0, abs=0.01)


def test_anything_else_is_refused() -> None:
    with pytest.raises(KeyError):
        Handover().restore({})


def test_a_joiner_refuses_before_the_verdict_what_it_could_not_go_live_with(groups: list[str]) -> None:
    joiner = Handover(generation=3)
    places = {name: [1, 2, 3] for name in groups}
    for text, why in (
        ("", "expected the text of handover"),
        (json.dumps({"recovery": 1, "places": {**places, "another": [0, 0, 0]}}), "has a group another, which"),
        (json.dumps({"recovery": 3, "places": places}), "found a handover of generation 3"),
    ):
        with pytest.raises(ValueError, match=why):
            joiner.restore({**Handover().capture(), "text": text})
        assert joiner.text == ""
    joiner.restore({**Handover().capture(), "text": json.dumps({"recovery": 1, "places": places})})
    assert joiner.text
