"""What each operation must give, and who talks to whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.collectives.cells import OPS
from benchmarks.collectives.library import DirectLibrary, expected, partner


def test_pairs_are_lower_half_to_upper_half() -> None:
    assert [partner(rank, 8) for rank in range(8)] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert [partner(rank, 2) for rank in range(2)] == [1, 0]


def test_expected_results() -> None:
    assert expected("all_reduce", 3, 4, 4).tolist() == [10, 10, 10, 10]
    assert expected("reduce_scatter", 3, 4, 8).tolist() == [10, 10]
    assert expected("all_gather", 3, 4, 8).tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert expected("broadcast", 3, 4, 2).tolist() == [1, 1]
    assert expected("send_recv", 3, 4, 2).tolist() == [2, 2]


class Alone:
    """A communicator that notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *words: self.calls.append((name, *[len(w) if isinstance(w, np.ndarray) else w for w in words]))


@pytest.mark.parametrize(
    ("op", "rank", "call"),
    [
        ("all_reduce", 1, ("all_reduce", 16, 16)),
        ("reduce_scatter", 1, ("reduce_scatter", 16, 4)),
        ("all_gather", 1, ("all_gather", 4, 16)),
        ("broadcast", 1, ("broadcast", 16, 0)),
        ("send_recv", 1, ("send", 16, 3)),
        ("send_recv", 3, ("recv", 16, 1)),
    ],
)
def test_bytes_are_those_of_the_full_vector(op: str, rank: int, call: tuple[Any, ...]) -> None:
    assert op in OPS
    alone = Alone()
    run, result = DirectLibrary(rank, 4, alone, None).prepare(op, np.zeros(16, np.float32), np.zeros(16, np.float32))
    run()
    assert alone.calls == [call]
    assert (result is None) == (call[0] == "send")
