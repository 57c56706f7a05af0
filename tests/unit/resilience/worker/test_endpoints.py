"""How a controller's directory reaches the data plane."""

from __future__ import annotations

from typing import Any

import pytest

import trainmover_ext
from megatron.resilience.protocol.messages import Directory
from megatron.resilience.worker.endpoints import join_by, make_known

DIRECTORY = Directory(endpoints={rank: f"h:{rank}" for rank in range(6)}, slot_generations=(4, 1, 4))


def test_all_but_ones_own_are_made_known_by_when_their_slots_changed_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Any] = []
    monkeypatch.setattr(
        trainmover_ext, "add_endpoints", lambda endpoints, generation: known.append((generation, endpoints))
    )
    make_known(DIRECTORY, 1)
    assert known == [(1, {2: "h:2", 3: "h:3"}), (4, {0: "h:0", 4: "h:4", 5: "h:5"})]


def test_a_joiner_joins_with_the_generations_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []
    monkeypatch.setattr(trainmover_ext, "join_switch", lambda *arguments: joined.append(arguments))
    join_by(DIRECTORY, 7)
    assert joined == [(7, DIRECTORY.endpoints, {0: 4, 1: 4, 2: 1, 3: 1, 4: 4, 5: 4})]
