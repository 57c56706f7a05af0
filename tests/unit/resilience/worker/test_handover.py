"""The place of a rank's links goes over with its small state."""

from __future__ import annotations

import pytest

from megatron.resilience.worker.handover import Handover


def test_what_one_rank_captures_another_takes_over() -> None:
    leaver, joiner = Handover(), Handover()
    assert joiner.capture() == {"text": ""}
    leaver.text = '{"places": {}}'
    joiner.restore(leaver.capture())
    assert joiner.text == leaver.text


def test_anything_else_is_refused() -> None:
    with pytest.raises(KeyError):
        Handover().restore({})
