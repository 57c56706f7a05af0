"""How ranks find each other, once: the runtime of this process and its groups. Called by torch and Communicator.

The first group makes the runtime. Its ranks agree on a token and tell each other their endpoints in that group's store;
a later group with members not yet known asks its own store for those, once. After that no store is touched again. A
rank built alone (isolated) touches none: whoever lets it join adds the endpoints.

Keys begin with the number of the runtime in the store, which all ranks count together there, so that ranks that make
their groups anew with the same store never read what they left behind the last time.
"""

from __future__ import annotations

import atexit
import itertools
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from torch import distributed

from trainmover_ext import _C, flight_recorder
from trainmover_ext.endpoints import decode_endpoint, encode_endpoint
from trainmover_ext.settings import DataPlaneSettings, read_settings, refuse_torch_settings

__all__ = ["GroupMembers", "Rendezvous", "Store", "create_backend", "current", "process_rendezvous"]


class Store(Protocol):
    """What is needed of torch.distributed's stores."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    """A group as the one process sees it that makes it."""

    name: str
    """The same on all members; made unique here."""
    global_ranks: Sequence[int]
    group_rank: int
    timeout: timedelta

    @property
    def global_rank(self) -> int:
        """Of the process itself."""
        return self.global_ranks[self.group_rank]

    @property
    def timeout_ms(self) -> int:
        """The time-out as the extension wants it."""
        return max(1, int(self.timeout.total_seconds() * 1000))


@dataclass(slots=True, weakref_slot=True)
class Rendezvous:
    """The runtime and what was made in it. One a process at a time; `process_rendezvous` holds it."""

    runtime: _C.Runtime
    settings: DataPlaneSettings
    number: int
    """How many runtimes the ranks had made before, together."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    """Global ranks of each communicator made so far."""
    _names: Counter[str] = field(default_factory=Counter)

    def unique_name(self, group: GroupMembers) -> str:
        """A name never used before, the same on all members, who make groups of one name in the same order."""
        self._names[group.name] += 1
        name = f"{self.number}/{group.name}"
        if self._names[group.name] > 1:
            name += f"#{self._names[group.name]}"
        self.groups[name] = list(group.global_ranks)
        return name

    def learn_members(self, store: Store, group: GroupMembers) -> None:
        """Blocks until the endpoints of all members are known. Raises TimeoutError naming those that did not come."""
        if self.runtime.isolated:
            return
        missing = [rank for rank in group.global_ranks if rank != group.global_rank and not self.runtime.knows(rank)]
        if not missing:
            return
        keys = {rank: f"trainmover/{self.number}/endpoint/{rank}" for rank in group.global_ranks}
        store.set(keys[group.global_rank], encode_endpoint(self.runtime.endpoint()))
        try:
            store.wait([keys[rank] for rank in missing], group.timeout)
        except RuntimeError as error:
            absent = [rank for rank in missing if not store.check([keys[rank]])]
            raise TimeoutError(
                f"group {group.name}: global ranks {absent} did not tell their endpoints within {group.timeout}; all "
                f"of {list(group.global_ranks)} must make this group. Look at those ranks' output"
            ) from error
        told = store.multi_get([keys[rank] for rank in missing])
        self.runtime.add_endpoints({rank: decode_endpoint(text) for rank, text in zip(missing, told, strict=True)})


class _Process:
    """The rendezvous of this process; a new one after its runtime has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rendezvous: Rendezvous | None = None
        self._isolated_numbers: Iterator[int] = itertools.count()

    def current(self) -> Rendezvous | None:
        """None: there is no runtime, or none any more."""
        rendezvous = self._rendezvous
        return None if rendezvous is None or rendezvous.runtime.ended() else rendezvous

    def join(self, store: Store, group: GroupMembers) -> tuple[Rendezvous, str]:
        """The rendezvous, with the members of `group` known, and the group's name in the job."""
        with self._lock:
            rendezvous = self.current()
            if rendezvous is None:
                rendezvous = self._start(store, group)
                self._rendezvous = rendezvous
            elif rendezvous.runtime.global_rank != group.global_rank:
                raise ValueError(
                    f"group {group.name}: this process is global rank {rendezvous.runtime.global_rank}, but the group "
                    f"takes it for {group.global_rank}; destroy the process group before it takes another rank"
                )
            rendezvous.learn_members(store, group)
            return rendezvous, rendezvous.unique_name(group)

    def shut_down(self) -> None:
        """Ends the runtime, if there is one: peers are told that this process leaves on purpose."""
        with self._lock:
            if self._rendezvous is not None:
                self._rendezvous.runtime.shutdown()
                self._rendezvous = None

    def _start(self, store: Store, group: GroupMembers) -> Rendezvous:
        settings = read_settings()
        size = len(group.global_ranks)
        if settings.isolated:
            number, token = next(self._isolated_numbers), settings.token or secrets.token_hex(32)
        else:
            number = (store.add("trainmover/joined", 1) - 1) // size
            token = settings.token or _agree_on_token(store, number, group)
        runtime = _C.Runtime(
            global_rank=group.global_rank,
            job_id=settings.job_id,
            token=token,
            # More ranks than there are cost a little latency, fewer would make them spin each other's cores away.
            settings=_extension_settings(settings, local_ranks=settings.local_ranks or size),
            isolated=settings.isolated,
        )
        runtime.add_endpoints({group.global_rank: runtime.endpoint()})  # who shares a machine with whom
        rendezvous = Rendezvous(runtime=runtime, settings=settings, number=number)
        if settings.flight_recorder_prefix:
            _write_flight_record_on_abort(rendezvous)
        return rendezvous


def _write_flight_record_on_abort(rendezvous: Rendezvous) -> None:
    weak = weakref.ref(rendezvous)  # which holds the runtime, and that the callback

    def write() -> None:
        if (held := weak()) is not None:
            flight_recorder.write_on_abort(held)

    rendezvous.runtime.on_abort(write)


def _agree_on_token(store: Store, number: int, group: GroupMembers) -> str:
    key = f"trainmover/{number}/token"
    if group.group_rank == 0:
        token = secrets.token_hex(32)
        store.set(key, token)
        return token
    try:
        store.wait([key], group.timeout)
    except RuntimeError as error:
        raise TimeoutError(
            f"group {group.name}: global rank {group.global_ranks[0]} did not come within {group.timeout}; it draws "
            "the job's token. Look at its output"
        ) from error
    return store.get(key).decode()


def _extension_settings(settings: DataPlaneSettings, *, local_ranks: int) -> _C.Settings:
    made = _C.Settings()
    made.bind_address = settings.bind_address
    made.machine_id = settings.machine_id
    made.peer_timeout_ms = settings.peer_timeout_ms
    made.connect_timeout_ms = settings.connect_timeout_ms
    made.use_shared_memory = settings.use_shared_memory
    made.use_cross_memory = settings.use_cross_memory
    made.local_ranks = local_ranks
    made.flight_recorder_path = settings.flight_recorder_prefix
    made.trace_path = settings.trace_prefix
    return made


process_rendezvous = _Process()
atexit.register(process_rendezvous.shut_down)


def current() -> Rendezvous:
    """The rendezvous of this process. Raises RuntimeError before the first group and after the last."""
    rendezvous = process_rendezvous.current()
    if rendezvous is None:
        raise RuntimeError(
            "this process has no data plane; make a group first: torch.distributed.init_process_group('trainmover') or "
            "Communicator.from_store(...)"
        )
    return rendezvous


def create_backend(options: Any, backend_options: Any = None) -> Any:
    """What torch.distributed calls for each new group (register_backend with extended_api)."""
    del backend_options  # there is nothing to choose per group
    refuse_torch_settings(
        debug_detail=distributed.distributed_c10d.get_debug_level() is distributed.distributed_c10d.DebugLevel.DETAIL,
    )
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    group = GroupMembers(
        name=options.group_id,
        global_ranks=members,
        group_rank=options.group_rank,
        timeout=options.timeout,
    )
    rendezvous, name = process_rendezvous.join(options.store, group)
    return rendezvous.runtime.create_backend(
        name=name,
        global_ranks=members,
        timeout_ms=group.timeout_ms,
        world=not options.global_ranks_in_group,
    )
