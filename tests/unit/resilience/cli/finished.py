"""A resilience directory whose controller has gone, for the tests of users' commands."""

from __future__ import annotations

import socket
from pathlib import Path

from megatron.resilience.controller.directory import ResilienceDirectory
from megatron.resilience.controller.store import SqliteStore, describe_job
from megatron.resilience.protocol.journal import (
    AnyEntry,
    CommandTaken,
    JobEnded,
    JobStarted,
    Move,
    SwitchBegun,
    SwitchPhase,
    encode_entry,
)

STARTED = JobStarted(time_ms=1e12, machines=("machine-0", "machine-1"), incarnations=(5, 6))
TAKEN = CommandTaken(time_ms=1e12, command_id="c", leavers=("machine-1",), to=())
MOVE = Move(slot=1, leaver="machine-1", joiner="machine-2", incarnation=7, reason="the only one")
BEGUN = SwitchBegun(time_ms=1e12, generation=2, command_id="c", moves=(MOVE,))
PREPARING = SwitchPhase(time_ms=1e12 + 50, generation=2, phase="prepare links")
ENDED = JobEnded(time_ms=1e12 + 100, ok=False, why="global rank 1 on machine machine-1 ended: killed")


def make(path: Path, *entries: AnyEntry) -> ResilienceDirectory:
    directory = ResilienceDirectory(path=path)
    directory.make()
    directory.write_token("token")
    with socket.create_server(("127.0.0.1", 0)) as server:
        directory.write_address(f"127.0.0.1:{server.getsockname()[1]}")
    store = SqliteStore(directory.journal, description=describe_job("night", slots=2, ranks_per_machine=1))
    store.open()
    for entry in entries:
        store.append(encode_entry(entry))
    store.close()
    return directory
