"""A rank checks results, times calls, and refuses what it does not know."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.collectives.library import Array
from benchmarks.collectives.rank import Rank


class Scripted:
    """A library of one lone rank whose broadcast can be made to go wrong."""

    rank, ranks = 0, 2

    def __init__(self, wrong_at: int | None = None) -> None:
        self.wrong_at, self.log = wrong_at, list[str]()

    def barrier(self) -> None:
        self.log.append("barrier")

    def prepare(self, op: str, source: Array, target: Array) -> tuple[Callable[[], None], Array | None]:
        def call() -> None:
            self.log.append(op)
            if self.wrong_at is not None:
                source[self.wrong_at] = 7

        return call, source


def test_a_right_result_passes_and_leaves_zeros() -> None:
    library = Scripted()
    rank = Rank({"own": library}, 64)
    assert rank.obey({"do": "check", "library": "own", "op": "broadcast", "bytes": 64}) == {}
    assert library.log == ["barrier", "broadcast"]
    assert not rank._source.any(), "or the sums would grow without end"


@pytest.mark.parametrize("at", [0, 15])
def test_one_wrong_element_is_found(at: int) -> None:
    rank = Rank({"own": Scripted(at)}, 64)
    with pytest.raises(ValueError, match=rf"own: broadcast of 64 bytes: found 7.0 at element {at}, expected 1.0"):
        rank.obey({"do": "check", "library": "own", "op": "broadcast", "bytes": 64})


def test_each_call_begins_after_a_barrier_and_the_first_is_not_counted() -> None:
    library = Scripted()
    message = {"do": "measure", "library": "own", "op": "broadcast", "bytes": 32, "iterations": 3}
    reply = Rank({"own": library}, 64).obey(message)
    assert library.log == ["barrier", "broadcast"] * 4
    assert len(reply["seconds"]) == 3
    assert min(reply["seconds"]) > 0
    assert reply["each_s"] >= sum(reply["seconds"]) / 4


@pytest.mark.parametrize(("kind", "result"), [("reduce", 3.0), ("copy", 2.0)])
def test_rates_add_or_copy(kind: str, result: float) -> None:
    rank = Rank({}, 64)
    rank._source.fill(2)
    rank._target.fill(1)
    assert rank.obey({"do": "rate", "kind": kind, "bytes": 64, "seconds": 0})["bytes_per_s"] > 0
    assert np.all(rank._target == result)


def test_an_unknown_message_is_refused() -> None:
    with pytest.raises(ValueError, match="found message 'dance', expected check, measure or rate"):
        Rank({}, 64).obey({"do": "dance"})
