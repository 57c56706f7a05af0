"""The MAX of votes; among ranks and in switches it is shown by tests/distributed/test_prove_planned.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest

from megatron.resilience.protocol.vote import Contribution
from megatron.training import preload  # noqa: F401  (device and patches first)


@pytest.mark.parametrize("numbers", [(0, 0, 0), (2**40 + 3, 1, 3)])
def test_a_vote_of_one_rank_is_its_own(
    lone_rank: Callable[[str], AbstractContextManager[Any]], numbers: tuple[int, int, int]
) -> None:
    from megatron.training.vote_group import VoteGroup

    cast, veto, exits = numbers
    own = Contribution(cast=cast, veto=veto, exit=exits)
    with lone_rank("--distributed-backend trainmover"):
        votes = VoteGroup(0, 1, timeout=timedelta(minutes=1))
        assert votes.all_reduce(own) == own
        votes.close()
