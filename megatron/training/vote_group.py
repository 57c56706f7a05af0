"""The group in which the ranks of a job vote in each iteration. Made by `switching.py`; needs the extension."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
from torch._C._distributed_c10d import HashStore

from megatron.resilience.protocol.vote import VOTE_NUMBERS, Contribution
from trainmover_ext import Communicator


class VoteGroup:
    """Forms the MAX of all ranks' votes. A communicator of its own on the host: no dispatch, and no device waits.

    int64 of shape [VOTE_NUMBERS]. All ranks make it at the same place; one that is built alone makes it alone.
    """

    def __init__(self, global_rank: int, world_size: int, *, timeout: timedelta) -> None:
        # Nobody is met in the store: the world's group has told where all listen, or the agent will.
        self._group = Communicator.from_store(HashStore(), global_rank, world_size, name="vote", timeout=timeout)
        # Ranks come to the vote one after the other, while others compute: looking often would take their time.
        self._group.sleep_while_waiting()
        self._numbers = np.zeros(VOTE_NUMBERS, dtype=np.int64)

    def all_reduce(self, own: Contribution) -> Contribution:
        """Collective."""
        self._numbers[:] = own.numbers()
        self._group.all_reduce(self._numbers, op="max")
        cast, veto, ending = self._numbers.tolist()
        return Contribution(cast=cast, veto=veto, exit=ending)

    def close(self) -> None:
        """No vote after this."""
        self._group.close()
