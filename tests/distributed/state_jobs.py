"""Forks jobs whose ranks hand their state over at a boundary. One JSON request a line on stdin.

A request: {"argv", "world_size", "boundary", "iterations", "folder", "lone_ranks"}. Three kinds of processes take part:
a job of *leavers* that trains to `iterations` and at `boundary` gives each rank's state away; *lone* joiners, built
alone in mode isolated as the ranks asked for; and *heirs*, a second job of as many ranks that trains on from what it
was given. Each writes what it saw as JSON into `folder/KIND-RANK.json`.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.resilience.state.completeness import unlisted_tensors
from megatron.resilience.state.inventory import Inventory, take_inventory
from megatron.resilience.state.state_client import StateClient
from megatron.resilience.state.state_server import StateServer
from megatron.resilience.state.transfer import TransferIdentity, TransferLimits, Verdict
from megatron.resilience.worker.handover import Handover
from megatron.training import preload
from megatron.training.bookkeeping import LoopBookkeeping
from megatron.training.checkpointing import Checkpointer, Progress
from megatron.training.data import build_gpt_datasets, dataset_sizes
from megatron.training.ending import Ending, EndingWatch
from megatron.training.environment import read_environment
from megatron.training.initialize import join_job, leave_job
from megatron.training.joining import Joiner, build_joiner
from megatron.training.loop import Datasets, TrainingLoop
from megatron.training.membership import FixedMembership
from megatron.training.model_setup import build_trainee
from megatron.training.preflight import plan_run
from megatron.training.reporting import Reporter
from megatron.training.state_digest import state_digest
from pretrain_gpt import forward_step, model_provider
from tests.distributed.job_server import wait_for

assert preload
LIMITS = TransferLimits(
    total_s=200.0, stall_s=60.0, progress_s=200.0, handshake_s=60.0, reconnect_s=60.0, chunk_bytes=100_000
)
Request = dict[str, Any]


class Recorder(Reporter):
    """A reporter that keeps every step's result."""

    steps: list[Any]

    def step(self, iteration: int, consumed_samples: int, result: Any, params_norm: float | None) -> None:
        self.steps = [*getattr(self, "steps", []), [iteration, consumed_samples, dataclasses.asdict(result)]]
        super().step(iteration, consumed_samples, result, params_norm)


class StopAt(EndingWatch):
    """Ends the loop after one iteration of choice."""

    last = 0

    def agree(self, iteration: int) -> Ending:
        return Ending.INTERVAL_REACHED if iteration == self.last else Ending.GOES_ON


def build_live(request: Request) -> Joiner:
    """A rank of a job that trains together, with its inventory taken."""
    environment = read_environment()
    plan, _ = plan_run(request["argv"], world_size=environment.world_size, on_cuda=False)
    join_job(plan, environment)
    trainee, progress = build_trainee(plan, model_provider), Progress()
    train, valid, test = build_gpt_datasets(plan, dataset_sizes(plan))
    reporter, checkpointer, watch = Recorder(plan, speaks=False), Checkpointer(plan), StopAt(plan.settings.run)
    handover = Handover()
    bookkeeping = LoopBookkeeping(
        progress=progress, reporter=reporter, checkpointer=checkpointer, watch=watch, links=handover
    )
    return Joiner(
        plan=plan,
        trainee=trainee,
        datasets=Datasets(train=train, valid=valid, test=test),
        reporter=reporter,
        checkpointer=checkpointer,
        watch=watch,
        progress=progress,
        inventory=take_inventory(trainee, bookkeeping),
        handover=handover,
    )


def train(rank: Joiner, *, until: int) -> None:
    assert isinstance(rank.watch, StopAt)
    rank.watch.last = until
    loop = TrainingLoop(rank.plan, rank.trainee, rank.datasets, forward_step, rank.checkpointer, rank.reporter)
    loop.run(rank.progress, FixedMembership(rank.watch))


def seen(rank: Joiner) -> dict[str, Any]:
    """What two ranks of equal state agree on; clocks differ."""
    values = rank.inventory.capture()
    parts = json.loads(json.dumps(small_values(values)))
    for part, clock in (("reporter", "started_s"), ("watch", "elapsed_s")):
        parts["bookkeeping"][part].pop(clock)
    return {
        "digest": state_digest(rank.trainee),
        "arenas": [hashlib.sha256(memory).hexdigest() for memory in rank.inventory.memory()],
        "layout": rank.inventory.layout_digest().hex(),
        "small": parts,
        "unlisted": unlisted_tensors(rank.trainee, rank.inventory),
        "small_bytes": len(values),
    }


def small_values(payload: bytes) -> Any:
    import msgspec

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return plain(msgspec.msgpack.decode(payload))


class MadeTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, sums up the memory that tensors of this thread get: no less than the growth of their peak.

    Nothing is subtracted when a tensor goes, so that no moment of a transfer can be missed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._known = {storage.data_ptr(): storage.nbytes() for storage in storages}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(given):
            if isinstance(tensor, torch.Tensor):
                place, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
                self.bytes += size if size > self._known.get(place, 0) else 0
                self._known[place] = size
        return given


def identity(kind: str, rank: int) -> TransferIdentity:
    generation = {"lone": 2, "heir": 3}[kind]
    return TransferIdentity(job_id="state-jobs", token="not a secret", generation=generation, global_rank=rank)


def give(request: Request, inventory: Inventory, kind: str, rank: int) -> dict[str, Any]:
    with MadeTensors() as made, StateServer(identity(kind, rank), limits=LIMITS) as server:
        address = server.listen()
        place = Path(request["folder"]) / f"{kind}-{rank}.address"
        place.with_suffix(".partial").write_text(address)
        place.with_suffix(".partial").rename(place)
        report = server.send_state(inventory)
        told = server.send_verdict(Verdict.LEAVE if kind == "heir" else Verdict.STAY)
    return {"made": made.bytes, "moved": report.bytes_moved, "told": told}


def take(request: Request, inventory: Inventory, kind: str, rank: int) -> dict[str, Any]:
    place = Path(request["folder"]) / f"{kind}-{rank}.address"
    deadline = time.monotonic() + LIMITS.total_s
    while not place.exists():
        assert time.monotonic() < deadline, f"{place} did not come"
        time.sleep(0.02)
    with MadeTensors() as made, StateClient(identity(kind, rank), place.read_text(), limits=LIMITS) as client:
        client.receive_state(inventory)
        verdict = client.receive_verdict()
    return {"made": made.bytes, "verdict": verdict.value}


def leaver(request: Request, rank: int) -> dict[str, Any]:
    own = build_live(request)
    train(own, until=request["boundary"])
    result: dict[str, Any] = {"boundary": seen(own)}
    if rank in request["lone_ranks"]:
        result["lone"] = give(request, own.inventory, "lone", rank)
    result["heir"] = give(request, own.inventory, "heir", rank)
    result["after"] = seen(own)
    train(own, until=request["iterations"])
    return {**result, "steps": own.reporter.steps, "end": seen(own)}  # type: ignore[attr-defined]


def heir(request: Request, rank: int) -> dict[str, Any]:
    own = build_live(request)
    taken = take(request, own.inventory, "heir", rank)
    result = {"taken": taken, "boundary": seen(own)}
    train(own, until=request["iterations"])
    return {**result, "steps": own.reporter.steps, "end": seen(own)}  # type: ignore[attr-defined]


def lone(request: Request, rank: int) -> dict[str, Any]:
    os.environ["TRAINMOVER_MODE"] = "isolated"
    own = build_joiner(
        request["argv"], read_environment(), model_provider=model_provider, datasets_provider=build_gpt_datasets
    )
    fresh = seen(own)
    taken = take(request, own.inventory, "lone", rank)
    return {"fresh": fresh, "taken": taken, "boundary": seen(own)}


BODIES = {"leaver": leaver, "heir": heir, "lone": lone}


def start(request: Request, kind: str, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    log = os.open(Path(request["folder"]) / f"{kind}-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request["world_size"]))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 1
    try:
        result = BODIES[kind](request, rank)
        (Path(request["folder"]) / f"{kind}-{rank}.json").write_text(json.dumps(result))
        leave_job()
        code = 0
    except BaseException:  # noqa: BLE001  (the edge of a rank's process)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ports = {"leaver": free_port(), "heir": free_port(), "lone": 1}
        pids = [
            start(request, kind, rank, ports[kind])
            for kind in ("leaver", "heir")
            for rank in range(request["world_size"])
        ]
        pids += [start(request, "lone", rank, ports["lone"]) for rank in request["lone_ranks"]]
        print(json.dumps({"exit_codes": wait_for(pids)}), flush=True)


if __name__ == "__main__":
    main()
