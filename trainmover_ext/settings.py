"""The one place where the data plane reads its environment. Called by rendezvous.py when the runtime is made.

| variable | meaning | default |
|---|---|---|
| TRAINMOVER_TOKEN | secret that all ranks of the job share | drawn by the first rank, passed on in the store |
| TRAINMOVER_JOB | name of the job, equal on all ranks | trainmover |
| TRAINMOVER_MACHINE | ranks with equal ids share memory | boot id and network namespace |
| TRAINMOVER_BIND_ADDRESS | address of this machine that the other ranks reach | see `bind_address` |
| TRAINMOVER_PEER_TIMEOUT_MS | silence after which a peer counts as lost | 30000 |
| TRAINMOVER_CONNECT_TIMEOUT_MS | time to make a link | 60000 |
| TRAINMOVER_TRANSPORT | auto, or tcp: no shared memory, also inside a machine | auto |
| TRAINMOVER_CROSS_MEMORY | auto, or off: never read another process's memory | auto |
| TRAINMOVER_FLIGHT_RECORDER | prefix of the file that an abort writes; the global rank is appended | none |
| TRAINMOVER_TRACE | prefix of a file with a hash of all that each operation is given and gives; slow | none |
| TRAINMOVER_MODE | live, or isolated: every operation returns at once, alone | live |
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DataPlaneSettings", "read_settings", "refuse_torch_settings"]

_PREFIX = "TRAINMOVER_"
_NAMES = (
    "TRAINMOVER_TOKEN",
    "TRAINMOVER_JOB",
    "TRAINMOVER_MACHINE",
    "TRAINMOVER_BIND_ADDRESS",
    "TRAINMOVER_PEER_TIMEOUT_MS",
    "TRAINMOVER_CONNECT_TIMEOUT_MS",
    "TRAINMOVER_TRANSPORT",
    "TRAINMOVER_CROSS_MEMORY",
    "TRAINMOVER_FLIGHT_RECORDER",
    "TRAINMOVER_TRACE",
    "TRAINMOVER_MODE",
)
_TIMEOUT_MS_MAX = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaneSettings:
    """Choices of this process; all may differ from rank to rank but `token` and `job_id`."""

    token: str | None
    """None: none was given; ranks agree on one in the store."""
    job_id: str
    machine_id: str
    """Empty: the extension takes boot id and network namespace."""
    bind_address: str
    peer_timeout_ms: int
    connect_timeout_ms: int
    use_shared_memory: bool
    use_cross_memory: bool
    flight_recorder_prefix: str
    """Empty: nothing is written."""
    trace_prefix: str
    """Empty: nothing is written."""
    isolated: bool
    local_ranks: int | None
    """Ranks of the job on this machine; None: not told."""


def read_settings(source: Mapping[str, str] | None = None) -> DataPlaneSettings:
    """The settings of this process, from os.environ or `source`.

    Raises ValueError for a value that is not one of those allowed, and for a TRAINMOVER_ name that looks like one of
    ours misspelt (other parts have names of their own).
    """
    variables = os.environ if source is None else source
    _refuse_misspelt(variables)
    return DataPlaneSettings(
        token=_filled(variables, "TRAINMOVER_TOKEN"),
        job_id=_filled(variables, "TRAINMOVER_JOB") or "trainmover",
        machine_id=variables.get("TRAINMOVER_MACHINE", ""),
        bind_address=bind_address(variables),
        peer_timeout_ms=_milliseconds(variables, "TRAINMOVER_PEER_TIMEOUT_MS", 30_000),
        connect_timeout_ms=_milliseconds(variables, "TRAINMOVER_CONNECT_TIMEOUT_MS", 60_000),
        use_shared_memory=_choice(variables, "TRAINMOVER_TRANSPORT", ("auto", "tcp")) == "auto",
        use_cross_memory=_choice(variables, "TRAINMOVER_CROSS_MEMORY", ("auto", "off")) == "auto",
        flight_recorder_prefix=variables.get("TRAINMOVER_FLIGHT_RECORDER", ""),
        trace_prefix=variables.get("TRAINMOVER_TRACE", ""),
        isolated=_choice(variables, "TRAINMOVER_MODE", ("live", "isolated")) == "isolated",
        local_ranks=_local_ranks(variables),
    )


def bind_address(variables: Mapping[str, str]) -> str:
    """TRAINMOVER_BIND_ADDRESS, else the address of this machine from which MASTER_ADDR is reached.

    That is loopback when MASTER_ADDR is, or is not set. Raises ValueError when MASTER_ADDR cannot be resolved or
    reached.
    """
    if address := _filled(variables, "TRAINMOVER_BIND_ADDRESS"):
        return address
    master = variables.get("MASTER_ADDR", "127.0.0.1")
    if master == "localhost" or master.startswith("127."):
        return "127.0.0.1"
    port = variables.get("MASTER_PORT", "")
    try:
        family, _, _, _, target = socket.getaddrinfo(
            master, int(port) if port.isdecimal() and port != "0" else 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: only asks the routing table
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR is {master!r}, which this machine cannot resolve or reach ({error}); correct it, or set "
            "TRAINMOVER_BIND_ADDRESS to the address of this machine that the other ranks reach"
        ) from error


def refuse_torch_settings(*, debug_detail: bool, source: Mapping[str, str] | None = None) -> None:
    """Raises ValueError for two settings of torch under which no rank could be built alone.

    `debug_detail`: torch's debug level is DETAIL, by TORCH_DISTRIBUTED_DEBUG or by a call.
    """
    variables = os.environ if source is None else source
    if debug_detail or variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        raise ValueError(
            "TORCH_DISTRIBUTED_DEBUG is DETAIL, with which torch wraps every backend in one that makes gloo groups and "
            "compares each call over the network, so no rank could be built alone; expected INFO or OFF: unset it. The "
            "trainmover backend compares the calls of ranks itself"
        )
    if variables.get("TORCH_DIST_INIT_BARRIER", "0").strip() not in ("", "0"):
        raise ValueError(
            "TORCH_DIST_INIT_BARRIER is set, with which every new group waits in a barrier over the store, where a "
            "machine that joins a running job would wait for ever; unset it"
        )


def _refuse_misspelt(variables: Mapping[str, str]) -> None:
    for name in variables:
        if name.startswith(_PREFIX) and name not in _NAMES:
            tails = {known.removeprefix(_PREFIX): known for known in _NAMES}
            close = difflib.get_close_matches(name.removeprefix(_PREFIX), tails, n=1, cutoff=0.75)
            if close:
                raise ValueError(f"environment variable {name} is not known; did you mean {tails[close[0]]}?")


def _filled(variables: Mapping[str, str], name: str) -> str | None:
    text = variables.get(name)
    if text is not None and not text.strip():
        raise ValueError(f"environment variable {name} is empty; give it a value, or unset it")
    return text


def _choice(variables: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    text = variables.get(name, allowed[0])
    if text not in allowed:
        raise ValueError(f"environment variable {name} is {text!r}, expected {' or '.join(allowed)}")
    return text


def _milliseconds(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, str(default))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _TIMEOUT_MS_MAX):
        raise ValueError(f"environment variable {name} is {text!r}, expected 1 to {_TIMEOUT_MS_MAX} milliseconds")
    return int(text)


def _local_ranks(variables: Mapping[str, str]) -> int | None:
    text = variables.get("LOCAL_WORLD_SIZE")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise ValueError(f"environment variable LOCAL_WORLD_SIZE is {text!r}, expected the ranks of this machine")
    return int(text)
