"""torch's own analyzer reads our records and finds the rank that did not come."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder.fr_trace import main as analyze

import trainmover_ext
from trainmover_ext.flight_recorder import torch_dump

if TYPE_CHECKING:
    from trainmover_ext._C import FlightRecord

PREFIX = "record_"


def record(number: int, operation: str = "all_reduce", **changes: Any) -> FlightRecord:
    made: FlightRecord = {
        "record_id": number,
        "communicator": "0/0",
        "operation": operation,
        "peer": -1,
        "point_to_point": False,
        "sequence": number + 1,
        "input_bytes": 0,
        "output_bytes": 400,
        "dtype": "Float",
        "element_bytes": 4,
        "generation": 0,
        "iteration": 0,
        "timeout_ms": 1000,
        "created_ns": 1_000 + number,
        "started_ns": 2_000 + number,
        "ended_ns": 3_000 + number,
        "state": "completed",
    }
    made.update(changes)  # type: ignore[typeddict-item]
    return made


def analyzed(folder: Path, ranks: list[list[FlightRecord]]) -> Any:
    """The collectives that the analyzer makes of the ranks' records."""
    for rank, records in enumerate(ranks):
        dump = torch_dump(records, {"0/0": list(range(len(ranks)))}, rank)
        (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(dump))
    output = folder / "database"
    analyze([str(folder), "--prefix", PREFIX, "--output", str(output)])
    return pickle.loads(output.read_bytes())[1]


def test_calls_that_agree_are_matched(tmp_path: Path) -> None:
    share = {"input_bytes": 400, "output_bytes": 800}
    ranks = [
        [
            record(0),
            record(1, "all_gather", **share),
            record(2, "reduce", input_bytes=400, output_bytes=400 if rank == 0 else 0),
            record(3, "barrier", output_bytes=0),
            record(4, "reduce_scatter", input_bytes=800, output_bytes=400),
            record(5, "broadcast"),
        ]
        for rank in range(2)
    ]
    database = analyzed(tmp_path, ranks)
    assert [(one.collective_name, one.pass_check) for one in database.collectives] == [
        (f"nccl:{name}", True)
        for name in ("all_reduce", "all_gather", "reduce", "barrier", "reduce_scatter", "broadcast")
    ]
    assert database.collectives[0].input_sizes == [[100]]


def test_a_send_and_its_receive_are_read(tmp_path: Path) -> None:
    message = {"point_to_point": True, "output_bytes": 0, "dtype": "Byte", "element_bytes": 1}
    for received, agrees in ((8, True), (4, False)):
        ranks = [
            [record(0, "send", **message | {"input_bytes": 8, "peer": 1})],
            [record(0, "recv", **message | {"output_bytes": received, "peer": 0})],
        ]
        database = analyzed(tmp_path, ranks)
        assert [(one.collective_name, one.pass_check) for one in database.collectives] == [("nccl:send 0->1", agrees)]


def test_the_rank_that_did_not_come_is_named(tmp_path: Path) -> None:
    database = analyzed(tmp_path, [[record(0), record(1, state="started", ended_ns=0)], [record(0)]])
    assert [one.missing_ranks for one in database.collectives] == [None, {1}]


def test_ranks_that_called_different_operations_are_told(tmp_path: Path) -> None:
    database = analyzed(tmp_path, [[record(0)], [record(0, "broadcast")]])
    assert "COLLECTIVE_TYPE_MISMATCH" in str(database.collectives[0].mismatch_collectives[1].type_of_mismatch)


def test_status_is_the_last_of_each_state() -> None:
    records = [record(0), record(1, state="failed"), record(2, state="scheduled", started_ns=0, ended_ns=0)]
    dump = torch_dump(records, {"0/0": [0, 1]}, 0)
    assert dump["pg_status"]["0"] == {
        "last_enqueued_collective": 3,
        "last_started_collective": 2,
        "last_completed_collective": 1,
    }
    assert [entry["retired"] for entry in dump["entries"]] == [True, True, False]
    assert dump["entries"][2]["time_discovered_started_ns"] is None


def test_an_abort_writes_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_single: Callable[[], None]
) -> None:
    monkeypatch.setenv("TRAINMOVER_FLIGHT_RECORDER", str(tmp_path / "new" / PREFIX))
    start_single()
    dist.all_reduce(torch.ones(10))
    dist.barrier()
    trainmover_ext.abort_collectives(reason="test")
    path = tmp_path / "new" / f"{PREFIX}0"
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    dump = pickle.loads(path.read_bytes())
    assert [entry["profiling_name"] for entry in dump["entries"]] == ["nccl:all_reduce", "nccl:barrier"]
    assert dump["entries"][0]["input_sizes"] == [[10]]
    assert dump["entries"][0]["input_dtypes"] == ["Float"]
    assert [path.name for path in path.parent.iterdir()] == [path.name]


def test_a_dump_can_be_asked_for(tmp_path: Path, start_single: Callable[[], None]) -> None:
    start_single()
    dist.all_reduce(torch.ones(3, dtype=torch.int64))
    trainmover_ext.dump_flight_record(tmp_path / "r0")
    dump = pickle.loads((tmp_path / "r0").read_bytes())
    assert dump["version"] == "2.10"
    assert [config["ranks"] for config in dump["pg_config"].values()] == ["[0]"]
    assert dump["entries"][0]["input_dtypes"] == ["Long"]
