"""A group of ranks without torch.distributed, for callers to whom the microseconds of c10d's dispatch matter."""

from __future__ import annotations

from datetime import timedelta
from typing import Self, cast

from trainmover_ext import _C
from trainmover_ext.rendezvous import GroupMembers, Store, process_rendezvous

__all__ = ["Communicator"]

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class Communicator(_C.Communicator):
    """Blocking collectives on CPU tensors, numpy arrays and other contiguous buffers. See `_C.pyi` for the methods."""

    @classmethod
    def from_store(
        cls, store: Store, rank: int, size: int, name: str = "direct", timeout: timedelta = _DEFAULT_TIMEOUT
    ) -> Self:
        """The communicator of all `size` ranks of the job, in which this process is global rank `rank`.

        Blocks until the other ranks have called too, unless they are known already; the store is not used after that.
        Raises TimeoutError naming the ranks that did not come, ValueError when this process has another rank already.
        """
        if not 0 <= rank < size:
            raise ValueError(f"found rank {rank} of {size}; expected a rank from 0 to {size - 1}")
        members = list(range(size))
        group = GroupMembers(name=f"direct/{name}", global_ranks=members, group_rank=rank, timeout=timeout)
        rendezvous, unique_name = process_rendezvous.join(store, group)
        made = _C.open_communicator(cls, rendezvous.runtime, unique_name, members, group.timeout_ms)
        return cast(Self, made)
