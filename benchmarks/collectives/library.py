"""How a rank calls the libraries that are compared: torch.distributed's backends, our communicator, Open MPI.

Used by rank.py. Each library is imported only where it is asked for: a rank of Open MPI never imports torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
TIMEOUT = timedelta(seconds=60)


class Library(Protocol):
    """One library, joined to the others of its job."""

    rank: int
    ranks: int

    def barrier(self) -> None:
        """Blocks until all ranks are here."""

    def prepare(self, op: str, source: Array, target: Array) -> tuple[Callable[[], None], Array | None]:
        """A call of `op`, and where its result lies (None: this rank has none).

        `source` and `target` are of the cell's full size; a result may overwrite either.
        """


class TorchLibrary:
    """A backend of torch.distributed. In place where torch has it so: all_reduce and broadcast."""

    def __init__(self, rank: int, ranks: int, group: Any) -> None:
        self.rank, self.ranks, self._group = rank, ranks, group
        self._torch: Any = importlib.import_module("torch")

    def barrier(self) -> None:
        """See Library."""
        self._torch.distributed.barrier(self._group)

    def prepare(self, op: str, source: Array, target: Array) -> tuple[Callable[[], None], Array | None]:
        """See Library."""
        dist, group = self._torch.distributed, self._group
        share = len(source) // self.ranks
        whole, part = self._torch.from_numpy(source), self._torch.from_numpy(source[:share])
        result = self._torch.from_numpy(target)
        if op == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group), source
        if op == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(result[:share], whole, group=group), target[:share]
        if op == "all_gather":
            return lambda: dist.all_gather_into_tensor(result[: share * self.ranks], part, group=group), target
        if op == "broadcast":
            return lambda: dist.broadcast(whole, 0, group=group), source
        peer = partner(self.rank, self.ranks)
        if peer > self.rank:
            return lambda: dist.send(whole, peer, group=group), None
        return lambda: dist.recv(result, peer, group=group), target


class DirectLibrary:
    """Our communicator without torch's dispatch: trainmover_ext.Communicator on arrays."""

    def __init__(self, rank: int, ranks: int, communicator: Any, store: Any) -> None:
        self.rank, self.ranks, self._communicator = rank, ranks, communicator
        self._store = store  # served by rank 0, from which others may still read

    def barrier(self) -> None:
        """See Library."""
        self._communicator.barrier()

    def prepare(self, op: str, source: Array, target: Array) -> tuple[Callable[[], None], Array | None]:
        """See Library."""
        ours, share = self._communicator, len(source) // self.ranks
        if op == "all_reduce":
            return lambda: ours.all_reduce(source, target), target
        if op == "reduce_scatter":
            part = target[:share]
            return lambda: ours.reduce_scatter(source, part), part
        if op == "all_gather":
            part = source[:share]
            return lambda: ours.all_gather(part, target), target
        if op == "broadcast":
            return lambda: ours.broadcast(source, 0), source
        peer = partner(self.rank, self.ranks)
        if peer > self.rank:
            return lambda: ours.send(source, peer), None
        return lambda: ours.recv(target, peer), target


class MpiLibrary:
    """Open MPI through mpi4py's calls on buffers, which add about a microsecond."""

    def __init__(self) -> None:
        self._world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD
        self.rank, self.ranks = int(self._world.rank), int(self._world.size)

    def barrier(self) -> None:
        """See Library."""
        self._world.Barrier()

    def prepare(self, op: str, source: Array, target: Array) -> tuple[Callable[[], None], Array | None]:
        """See Library."""
        world, share = self._world, len(source) // self.ranks
        if op == "all_reduce":
            return lambda: world.Allreduce(source, target), target
        if op == "reduce_scatter":
            part = target[:share]
            return lambda: world.Reduce_scatter_block(source, part), part
        if op == "all_gather":
            part = source[:share]
            return lambda: world.Allgather(part, target), target
        if op == "broadcast":
            return lambda: world.Bcast(source, 0), source
        peer = partner(self.rank, self.ranks)
        if peer > self.rank:
            return lambda: world.Send(source, peer), None
        return lambda: world.Recv(target, peer), target


def partner(rank: int, ranks: int) -> int:
    """The other rank of send_recv's pair: the lower half sends to the upper one."""
    half = ranks // 2
    return rank + half if rank < half else rank - half


def expected(op: str, rank: int, ranks: int, count: int) -> Array:
    """What an operation of `count` elements gives rank `rank` when every rank's source holds its own number plus 1."""
    if op in ("all_reduce", "reduce_scatter"):
        return np.full(count if op == "all_reduce" else count // ranks, ranks * (ranks + 1) / 2, np.float32)
    if op == "all_gather":
        return np.repeat(np.arange(1, ranks + 1, dtype=np.float32), count // ranks)
    return np.full(count, 1 if op == "broadcast" else partner(rank, ranks) + 1, np.float32)


def open_store(rank: int, ranks: int, port: int) -> Any:
    """The TCPStore of torch on loopback. Rank 0 serves it on a free port (`store.port`); others connect to `port`."""
    distributed: Any = importlib.import_module("torch.distributed")
    return distributed.TCPStore(
        "127.0.0.1", port if rank else 0, world_size=ranks, is_master=rank == 0, timeout=TIMEOUT, wait_for_workers=False
    )


def open_torch(names: Sequence[str], rank: int, ranks: int, store: Any) -> dict[str, Library]:
    """All of `names` but openmpi, in one process. Blocks until the job's other ranks do the same, 60 s at most."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    ours: Any = importlib.import_module("trainmover_ext") if set(names) - {"gloo"} else None
    dist = torch.distributed
    libraries: dict[str, Library] = {}
    for name in names:
        if name == "trainmover-direct":
            inner = dist.PrefixStore("direct", store)
            libraries[name] = DirectLibrary(
                rank, ranks, ours.Communicator.from_store(inner, rank, ranks, "direct"), inner
            )
        elif not dist.is_initialized():
            dist.init_process_group(name, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
            libraries[name] = TorchLibrary(rank, ranks, dist.group.WORLD)
        else:
            libraries[name] = TorchLibrary(rank, ranks, dist.new_group(backend=name, timeout=TIMEOUT))
    return libraries
