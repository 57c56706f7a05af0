"""The data plane: collectives between ranks whose processes can be replaced. Built by setup.py from csrc/.

Importing it registers the backend "trainmover" with torch.distributed, for CPU and CUDA tensors (this build
communicates CPU tensors); nothing else happens before the first group is made. After that, for the process: abort
and resume, the directory of endpoints, figures. Errors: see `errors`; settings: see `settings`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import torch.distributed

try:
    import trainmover_ext._C as _C
except ImportError as error:
    raise ImportError(
        f"the extension of trainmover_ext is not built, or not for this Python or torch ({error}); run `make setup`, "
        "or pip install --no-build-isolation -e . in the repository"
    ) from error

from trainmover_ext import flight_recorder, rendezvous
from trainmover_ext.communicator import Communicator
from trainmover_ext.endpoints import decode_endpoint, encode_endpoint
from trainmover_ext.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    HandshakeRefused,
    PeerLost,
    SwitchError,
    TransportError,
)
from trainmover_ext.switching import (
    NOTE_BYTES_MAX,
    LinkTally,
    Note,
    SwitchPhase,
    SwitchState,
    SwitchTally,
    abort_switch,
    check_handover,
    commit_switch,
    control_stats,
    go_live,
    handover,
    hold_links,
    join_switch,
    leave_switch,
    linked_ranks,
    prepare_switch,
    receive_note,
    send_note,
    switch_state,
)

__all__ = [
    "BACKEND",
    "NOTE_BYTES_MAX",
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "HandshakeRefused",
    "LinkTally",
    "Note",
    "PeerLost",
    "SwitchError",
    "SwitchPhase",
    "SwitchState",
    "SwitchTally",
    "TransportError",
    "abort_collectives",
    "abort_switch",
    "aborted",
    "add_endpoints",
    "check_handover",
    "commit_switch",
    "communicator_stats",
    "control_stats",
    "dump_flight_record",
    "endpoint",
    "flight_records",
    "generation",
    "go_live",
    "handover",
    "hold_links",
    "join_switch",
    "leave_switch",
    "linked_ranks",
    "memory_stats",
    "note_iteration",
    "prepare_switch",
    "receive_note",
    "register",
    "resume",
    "send_note",
    "set_mode",
    "shutdown",
    "switch_state",
]

BACKEND = "trainmover"
"""Name for `torch.distributed.init_process_group`."""


def register() -> None:
    """Makes the backend known to torch.distributed. Importing this package does it; again is harmless."""
    if BACKEND not in torch.distributed.Backend.backend_list:
        torch.distributed.Backend.register_backend(
            BACKEND, rendezvous.create_backend, extended_api=True, devices=["cpu", "cuda"]
        )


def abort_collectives(*, reason: str, culprit: int | None = None) -> None:
    """Ends every blocked and later operation with CollectiveAborted, here and on all peers, until `resume`.

    `culprit`: the global rank that is to blame, if one is. Returns at once; from any thread.
    """
    rendezvous.current().runtime.abort_collectives(-1 if culprit is None else culprit, reason)


def resume(generation: int, endpoints: Mapping[int, str] | None = None) -> None:
    """Enters `generation` after an abort: the same groups work again once all their members have called this.

    `endpoints`: those that change in it, by global rank, from the other processes' `endpoint()`. A switch under way is
    forgotten. Raises SwitchError unless `generation` is newer than any known here, those of switches and of
    `add_endpoints` included; ValueError for endpoints of another kind.
    """
    decoded = {rank: decode_endpoint(text) for rank, text in (endpoints or {}).items()}
    rendezvous.current().runtime.resume(generation, decoded)


def aborted() -> bool:
    """Whether the present generation was aborted, here or by a peer: operations raise until `resume`."""
    return rendezvous.current().runtime.aborted()


def generation() -> int:
    """The last recovery (1: none): what operations and aborts bear. A switch does not change it."""
    return rendezvous.current().runtime.generation()


def endpoint() -> str:
    """Where this rank is reached, for `add_endpoints` of the others."""
    return encode_endpoint(rendezvous.current().runtime.endpoint())


def add_endpoints(endpoints: Mapping[int, str], generation: int = 1) -> None:
    """Tells where other global ranks are reached, whose slots last changed hands in `generation`.

    Later calls win, but for news older than what is known. Idle connections to a process that a rank has left go, and
    whoever waits for one turns to the new process. Raises ValueError for text of another kind.
    """
    decoded = {rank: decode_endpoint(text) for rank, text in endpoints.items()}
    rendezvous.current().runtime.add_endpoints(decoded, generation)


def set_mode(mode: Literal["live", "isolated"]) -> None:
    """Isolated: every operation returns at once, as if all ranks had given what this one did; receives give zeros."""
    if mode not in ("live", "isolated"):
        raise ValueError(f"mode is {mode!r}, expected live or isolated")
    rendezvous.current().runtime.set_isolated(mode == "isolated")


def memory_stats() -> dict[str, int]:
    """Bytes that the data plane of this process holds, by kind."""
    return rendezvous.current().runtime.memory_stats()


def communicator_stats() -> list[_C.CommunicatorStats]:
    """Operations, links, bytes and waits of each communicator of this process."""
    return rendezvous.current().runtime.communicator_stats()


def flight_records() -> list[_C.FlightRecord]:
    """The last operations of this process, oldest first."""
    return rendezvous.current().runtime.flight_records()


def note_iteration(iteration: int) -> None:
    """Operations that start from now on belong to `iteration` of the training loop, in flight records and traces."""
    rendezvous.current().runtime.note_iteration(iteration)


def dump_flight_record(path: str | os.PathLike[str]) -> None:
    """Writes them to `path`, whose name ends in the global rank, for torch's `fr_trace`."""
    flight_recorder.write_dump(rendezvous.current(), path)


def shutdown() -> None:
    """Ends the data plane of this process, telling its peers. The next group starts another. Runs at exit by itself."""
    rendezvous.process_rendezvous.shut_down()


register()
