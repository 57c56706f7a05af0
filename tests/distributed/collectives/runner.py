"""Runs schedules on one rank and compares each result, bit for bit, with what it must be. In the rank's process."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store

import trainmover_ext
from tests.distributed.collectives import operands
from tests.distributed.collectives.direct_operands import DIRECT_STARTS
from tests.distributed.collectives.schedules import Call, Layout, schedule_of

TIMEOUT = timedelta(seconds=40)
_POLL_S = 30.0


class Work(Protocol):
    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> Any: ...


@dataclass(kw_only=True)
class Pending:
    """What a rank has started and not yet waited for."""

    call: Call
    works: list[Work]
    check: Callable[[], None]


class Groups:
    """This rank's side of a layout: a process group for each group it is in, and a Communicator of the world."""

    def __init__(self, layout: Layout, rank: int, store: Store) -> None:
        torch.set_num_threads(1)
        self.layout = layout
        self.rank = rank
        dist.init_process_group("trainmover", store=store, rank=rank, world_size=layout.size, timeout=TIMEOUT)
        self.handles: list[Any] = [dist.group.WORLD]
        for members in layout.groups[1:]:
            self.handles.append(dist.new_group(list(members), timeout=TIMEOUT))
        direct_store = HashStore() if isinstance(store, HashStore) else PrefixStore("direct", store)
        self.direct = trainmover_ext.Communicator.from_store(direct_store, rank, layout.size, timeout=TIMEOUT)

    def close(self) -> None:
        self.direct.close()
        dist.destroy_process_group()


GROUPS: Groups | None = None
"""The job this process is in."""


def groups() -> Groups:
    assert GROUPS is not None
    return GROUPS


def join(layout: Layout, rank: int, store_file: Path) -> None:
    """Makes the groups together with the other ranks."""
    global GROUPS
    GROUPS = Groups(layout, rank, FileStore(str(store_file), layout.size))


def join_alone(layout: Layout, rank: int) -> str:
    """Makes them alone, with TRAINMOVER_MODE isolated and a token; returns where this rank is reached."""
    global GROUPS
    GROUPS = Groups(layout, rank, HashStore())
    return trainmover_ext.endpoint()


def meet(endpoints: dict[int, str], generation: int) -> None:
    """Enters `generation` with the ranks at `endpoints`."""
    trainmover_ext.set_mode("live")
    trainmover_ext.resume(generation, endpoints)


def leave() -> None:
    global GROUPS
    groups().close()
    GROUPS = None
    trainmover_ext.shutdown()  # it has ended already, but is kept for questions


class Runner:
    """One schedule on this rank. `chance` decides when it waits, and how: not what it does."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._groups = groups()
        self._chance = random.Random(f"waits {seed} {self._groups.rank}")
        self.pending: list[Pending] = []
        self.checked = 0

    def run(self, length: int | None = None) -> int:
        """Operations that this rank took part in. Raises AssertionError naming the first with another result."""
        for call in schedule_of(self.seed, self._groups.layout, length):
            self._take(call)
        self._end_some(len(self.pending))
        return self.checked

    def end_all(self) -> list[BaseException]:
        """After an error: ends what is pending. Each raises CollectiveError, or its result is right."""
        errors: list[BaseException] = []
        while self.pending:
            try:
                self._end(self.pending.pop())
            except trainmover_ext.CollectiveError as error:
                errors.append(error)
        return errors

    def _take(self, call: Call) -> None:
        members = self._groups.layout.groups[call.group]
        if self._groups.rank not in members:
            return
        rank = members.index(self._groups.rank)
        if call.senders and rank != call.root and rank not in call.senders:
            return
        start = DIRECT_STARTS[call.kind] if call.direct else operands.STARTS[call.kind]
        handle = self._groups.direct if call.direct else self._groups.handles[call.group]
        started = operands.Operands(self.seed, call, rank, len(members))
        works = start(started, handle)
        self.pending.append(Pending(call=call, works=works, check=started.check))
        if self._chance.random() < 0.35:
            self._end(self.pending.pop())
        elif self._chance.random() < 0.25:
            self._end_some(self._chance.randint(1, len(self.pending)))

    def _end_some(self, count: int) -> None:
        for _ in range(count):
            self._end(self.pending.pop(self._chance.randrange(len(self.pending))))

    def _end(self, pending: Pending) -> None:
        errors: list[trainmover_ext.CollectiveError] = []
        for work in pending.works:
            try:
                self._wait(work)
            except trainmover_ext.CollectiveError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        try:
            pending.check()
        except AssertionError as error:
            raise AssertionError(f"seed {self.seed}, {pending.call}: {error}") from error
        self.checked += 1

    def _wait(self, work: Work) -> None:
        way = self._chance.random()
        if way < 0.1:
            deadline = time.monotonic() + _POLL_S
            while not work.is_completed():
                assert time.monotonic() < deadline, "an operation did not end while its rank looked at it"
                time.sleep(0.0005)
        elif way < 0.2:
            work.get_future().wait()
        work.wait()


def run_schedules(first: int, count: int) -> int:
    """The schedules of `count` seeds in a row; the operations checked."""
    checked = sum(Runner(seed).run() for seed in range(first, first + count))
    operands.check_inputs()
    return checked


def seed_for(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())
