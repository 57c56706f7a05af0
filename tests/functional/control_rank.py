"""A stand-in for a training script, for tests of the control plane: a real process that votes, switches and obeys.

Run by an agent. Its half of the protocol is the real `RankCore` behind the real `AgentLink`; what it trains is the
number of its iteration, and its data plane is the test's hub (`control_hub.py`), which it reaches at CONTROL_HUB.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from typing import Any

import msgspec

from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.memory import Peak, Room
from megatron.resilience.protocol.messages import (
    Built,
    Measured,
    Party,
    Progress,
    RankReport,
    Ready,
    WorkerHello,
    decode,
    encode,
)
from megatron.resilience.protocol.rank_core import RankCore
from megatron.resilience.protocol.switch import (
    BoundaryReached,
    BuildFinished,
    CommandCame,
    Contribute,
    EndProcess,
    Fail,
    FetchState,
    GoLive,
    LinkAppeared,
    LinksPrepared,
    ListenForTransfer,
    NoteCame,
    PeerLost,
    PrepareLinks,
    RankAction,
    RankEvent,
    Report,
    SendNote,
    SendState,
    SendVerdict,
    StartWait,
    TransferAcked,
    TransferFailed,
    TransferListening,
    TransferWhole,
    UpdateDirectory,
    VerdictCame,
    VoteClosed,
    VoteOpened,
    Wait,
    WaitedTooLong,
)
from megatron.resilience.protocol.vote import Contribution, Decision, decide
from megatron.resilience.worker.agent_link import AgentLink, LinkIdentity

LIMITS_S = {Wait.LEAD_DECIDES: 10.0, Wait.LEAD_VERDICT: 15.0, Wait.LEAVER_VERDICT: 20.0, Wait.DOUBT: 40.0}
VOTE_S = 60.0
POLL_S = 0.005


def measured(report: RankReport) -> RankReport:
    """With what a rank's shell adds: its peak has 100 bytes; what is left here the test may say."""
    match report:
        case Built():
            free = int(os.environ.get(f"CONTROL_FREE_{os.environ['TRAINMOVER_MACHINE']}", "0"))
            return msgspec.structs.replace(report, room=Room(host_held_bytes=1, host_free_bytes=free))
        case Ready() if report.transfer:
            return msgspec.structs.replace(report, peak=Peak(host_bytes=100))
    return report


class Hub:
    """The connection to the test's hub; a thread reads it."""

    def __init__(self, global_rank: int, generation: int) -> None:
        host, _, port = os.environ["CONTROL_HUB"].rpartition(":")
        if host == "bridge":  # each machine in a namespace of its own: the hub is at the bridge's other end
            host = os.environ["MASTER_ADDR"].rpartition(".")[0] + ".1"
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._socket.settimeout(None)
        self.inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self.say(kind="hello", rank=global_rank, generation=generation, pid=os.getpid())
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, **message: Any) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        for line in self._socket.makefile("rb"):
            self.inbox.put(json.loads(line))
        self.inbox.put({"kind": "hub gone"})


class Rank:
    """One rank: loop, core, link."""

    def __init__(self) -> None:
        environment = os.environ
        self.global_rank, self.world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self.generation = int(environment.get("TRAINMOVER_JOIN_GENERATION", "1"))
        self.joins = self.generation > 1
        assert (environment.get("TRAINMOVER_MODE") == "isolated") is self.joins
        self.endpoint = f"{environment['TRAINMOVER_MACHINE']}:{os.getpid()}"
        self.link = AgentLink(
            environment["TRAINMOVER_AGENT"],
            LinkIdentity(
                token=environment["TRAINMOVER_TOKEN"], global_rank=self.global_rank, generation=self.generation
            ),
        )
        self.core = RankCore(self.global_rank, generation=self.generation if self.joins else None)
        self.facts = Facts(model_digest=environment.get(f"CONTROL_DIGEST_{environment['TRAINMOVER_MACHINE']}", "same"))
        self.iteration = 1
        self.results: dict[int, list[int]] = {}
        self.contribution = Contribution()
        self.deadline: tuple[float, int] | None = None
        self.transfer: list[dict[str, Any]] = []
        self.fetches = 0
        self.granted = 0

    def start(self) -> None:
        self.link.start()
        self.hub = Hub(self.global_rank, self.generation)
        self.link.send(WorkerHello(generation=self.generation, endpoint=self.endpoint, facts=self.facts))
        print("ready", self.endpoint, "generation", self.generation, flush=True)
        if self.joins:
            self.feed(BuildFinished(endpoint=self.endpoint, facts=self.facts, memory_bytes=1))
        else:
            self.link.send(Built(generation=1, endpoint=self.endpoint, facts=self.facts, memory_bytes=1))
            for peer in {(self.global_rank + step) % self.world for step in (-1, 1)} - {self.global_rank}:
                self.feed(LinkAppeared(peer=peer))

    def run(self) -> None:
        self.start()
        while self.joins and not self.core.is_member:
            self.pump()
        while True:
            if not self.joins:
                self.feed(BoundaryReached(iteration=self.iteration))
            self.joins = False
            while self.core.is_waiting or not self.core.is_member:
                self.pump()
            result = self.vote()
            self.feed(VoteClosed(iteration=self.iteration, result=result))
            if self.granted:
                self.measure()
            decision = decide(result)
            if self.global_rank == 0:
                print(f" iteration {self.iteration}/ 100000 | lm loss: 2.0 |", flush=True)
            self.link.send(Progress(iteration=self.iteration, median_iteration_ms=10.0))
            if decision is Decision.EXIT:
                self.link.close()
                return
            if decision is Decision.SWITCH:
                self.granted = result.cast
            self.iteration += 1

    def vote(self) -> Contribution:
        self.feed(VoteOpened(iteration=self.iteration))
        self.results.clear()
        self.hub.say(kind="vote", iteration=self.iteration, numbers=self.contribution.numbers())
        deadline_s = time.monotonic() + VOTE_S
        while self.iteration not in self.results:
            self.pump()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no vote of iteration {self.iteration}")
        cast, veto, exits = self.results[self.iteration]
        return Contribution(cast=cast, veto=veto, exit=exits)

    def measure(self) -> None:
        generation, self.granted = self.granted, 0
        cost = Measured(
            generation=generation,
            boundary=self.iteration,
            downtime_ms=12.5,
            lost_ms=1.0,
            median_iteration_ms=10.0,
            links_replaced=1,
            bytes_moved=1000,
        )
        self.link.send(cost)

    # -------------------------------------------------------------- events

    def pump(self) -> None:
        for command in self.link.take():
            self.feed(CommandCame(command=command))
        with contextlib.suppress(queue.Empty):
            self.hear(self.hub.inbox.get(timeout=POLL_S))
        if not self.link.is_open:
            raise ConnectionError("the agent has gone")
        if self.deadline is not None and time.monotonic() > self.deadline[0]:
            generation, self.deadline = self.deadline[1], None
            if self.core.is_waiting:
                self.feed(WaitedTooLong(generation=generation))

    def hear(self, said: dict[str, Any]) -> None:
        match said["kind"]:
            case "result":
                self.results[said["iteration"]] = said["numbers"]
            case "note":
                payload = base64.b64decode(said["payload"])
                note = decode(payload, sender=Party.RANK, receiver=Party.PEER)
                self.feed(NoteCame(sender=said["sender"], note=note))
            case "acked":
                self.feed(TransferAcked(generation=said["generation"]))
            case "joiner lost":
                self.feed(TransferFailed(generation=said["generation"], why="the joiner is gone"))
            case "state" | "verdict":
                self.transfer.append(said)
                self.take_transfer()
            case "lost" if said["rank"] != self.global_rank:
                self.feed(PeerLost(global_rank=said["rank"]))
                if not self.core.is_waiting:
                    raise ConnectionError(f"PeerLost({said['rank']})")
            case "hub gone":
                raise SystemExit("the hub has gone")

    def take_transfer(self) -> None:
        """Joiner: what its leaver has sent, once it was told to fetch it."""
        while self.fetches and self.transfer:
            said = self.transfer.pop(0)
            if said["kind"] == "state":
                self.iteration = said["iteration"]
                self.hub.say(kind="to leaver", what="acked", generation=self.generation)
                self.feed(TransferWhole(generation=self.generation))
            else:
                self.feed(VerdictCame(generation=self.generation, leave=said["leave"]))

    def feed(self, event: RankEvent) -> None:
        for action in self.core.step(event):
            self.act(action)

    def act(self, action: RankAction) -> None:
        match action:
            case Report(report=report):
                print("reports", type(report).__name__, flush=True)
                self.link.send(measured(report))
            case Contribute(contribution=contribution):
                self.contribution = contribution
            case SendNote(peer=peer, note=note):
                self.hub.say(kind="note", to=peer, payload=base64.b64encode(encode(note)).decode())
            case PrepareLinks(generation=generation):
                self.feed(LinksPrepared(generation=generation))
            case ListenForTransfer(generation=generation):
                self.feed(TransferListening(generation=generation, address="hub"))
            case SendState(generation=generation):
                self.hub.say(kind="to joiner", what="state", generation=generation, iteration=self.iteration)
            case SendVerdict(generation=generation, leave=leave):
                self.hub.say(kind="to joiner", what="verdict", generation=generation, leave=leave)
            case FetchState():
                self.fetches += 1
                self.take_transfer()
            case StartWait(generation=generation, wait=wait):
                self.deadline = (time.monotonic() + LIMITS_S[wait], generation)
            case GoLive(generation=generation):
                self.granted = generation
                self.hub.say(kind="live")
            case UpdateDirectory(directory=directory):
                if len(directory.endpoints) != self.world:
                    raise RuntimeError(f"found {directory}, expected the endpoints of {self.world} ranks")
            case Fail(why=why):
                raise RuntimeError(why)
            case EndProcess(why=why):
                print("ends:", why, flush=True)
                self.link.close()
                sys.exit(int(os.environ.get("CONTROL_LEAVER_CODE", "0")))  # nobody minds: its slot has moved
            case _:
                pass


if __name__ == "__main__":
    assert "torch" not in sys.modules
    assert msgspec.__version__
    Rank().run()
