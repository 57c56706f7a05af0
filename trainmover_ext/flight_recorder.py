"""The last operations of this rank, in the format of torch's own flight recorder.

`python -m torch.distributed.flight_recorder.fr_trace DIRECTORY` reads the files of all ranks and says which rank
did not come to which operation. Called on every abort, when TRAINMOVER_FLIGHT_RECORDER is set, and by
`dump_flight_record`.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainmover_ext._C import FlightRecord
    from trainmover_ext.rendezvous import Rendezvous

__all__ = ["torch_dump", "write_dump"]

_VERSION = "2.10"
"""Of torch's format, not of torch."""
_PREFIX = "nccl"
"""The analyzer knows the backends of torch only; names and sizes of operations are as NCCL's."""
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
"""Operations that torch records with as much output as input on every rank."""


def write_on_abort(rendezvous: Rendezvous) -> None:
    """Writes `<prefix><global rank>`. Called on the progress thread: tells of an error, and raises none."""
    path = f"{rendezvous.settings.flight_recorder_prefix}{rendezvous.runtime.global_rank}"
    try:
        write_dump(rendezvous, path)
    except OSError as error:
        print(f"trainmover_ext: the flight record could not be written to {path}: {error}", file=sys.stderr)


def write_dump(rendezvous: Rendezvous, path: str | os.PathLike[str]) -> None:
    """Writes the records of this process to `path`, whole or not at all."""
    runtime = rendezvous.runtime
    dump = torch_dump(runtime.flight_records(), rendezvous.groups, runtime.global_rank)
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_bytes(pickle.dumps(dump))
    unfinished.replace(target)


def torch_dump(records: Iterable[FlightRecord], groups: Mapping[str, list[int]], global_rank: int) -> dict[str, Any]:
    """`records` of rank `global_rank`, made in `groups` (global ranks by name), as torch's analyzer expects them."""
    groups = dict(groups)  # may grow meanwhile
    numbers = {name: number for number, name in enumerate(groups)}
    entries = [
        _entry(record, numbers[record["communicator"]], groups[record["communicator"]].index(global_rank))
        for record in records
        if record["communicator"] in groups
    ]
    return {
        "version": _VERSION,
        "pg_config": {name: {"name": name, "desc": "undefined", "ranks": str(ranks)} for name, ranks in groups.items()},
        "pg_status": {str(number): _status(name, entries) for name, number in numbers.items()},
        "entries": entries,
    }


def _profiling_name(record: FlightRecord, group_rank: int) -> str:
    """As torch has it: `nccl:all_reduce`, `nccl:send 0->1`, `nccl:recv 1<-0`."""
    operation = record["operation"]
    if record["point_to_point"] and " " not in operation:
        operation += f" {group_rank}{'->' if operation == 'send' else '<-'}{record['peer']}"
    return f"{_PREFIX}:{operation}"


def _entry(record: FlightRecord, group_number: int, group_rank: int) -> dict[str, Any]:
    operation = record["operation"].split(" ")[0]
    count = [record[key] // record["element_bytes"] for key in ("input_bytes", "output_bytes")]
    if operation in _IN_PLACE:
        count = [max(count)] * 2
    elif operation == "barrier":
        count = [1, 1]
    is_p2p = record["point_to_point"]
    state = record["state"]
    return {
        "record_id": record["record_id"],
        "pg_id": group_number,
        "process_group": (record["communicator"], "undefined"),
        "collective_seq_id": 0 if is_p2p else record["sequence"],
        "p2p_seq_id": record["sequence"] if is_p2p else 0,
        "op_id": record["sequence"],
        "profiling_name": _profiling_name(record, group_rank),
        "time_created_ns": record["created_ns"],
        "input_sizes": [[count[0]]],
        "input_dtypes": [record["dtype"]],
        "output_sizes": [[count[1]]],
        "output_dtypes": [record["dtype"]],
        # torch's format has no word for failed; what it says of such an operation is that it was under way.
        "state": "started" if state == "failed" else state,
        "time_discovered_started_ns": record["started_ns"] or None,
        "time_discovered_completed_ns": record["ended_ns"] or None,
        "retired": state in ("completed", "failed"),
        "timeout_ms": record["timeout_ms"],
        "is_p2p": is_p2p,
        "frames": [],
    }


def _status(name: str, entries: list[dict[str, Any]]) -> dict[str, int]:
    """The last collective of group `name` that was enqueued, started and completed; -1: none."""
    last = {"last_enqueued_collective": -1, "last_started_collective": -1, "last_completed_collective": -1}
    reached = {
        "scheduled": ("last_enqueued_collective",),
        "started": ("last_enqueued_collective", "last_started_collective"),
        "completed": tuple(last),
    }
    for entry in entries:
        if entry["process_group"][0] == name and not entry["is_p2p"]:
            for key in reached[entry["state"]]:
                last[key] = max(last[key], entry["collective_seq_id"])
    return last
