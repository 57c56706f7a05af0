"""A machine in the simulation: a thin shell round `AgentCore`, its connection to the controller, its processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.resilience.protocol.agent_core import (
    AgentAction,
    AgentCore,
    AgentEvent,
    Connected,
    ControllerSaid,
    Disconnected,
    EndRank,
    Hang,
    ProcessEnded,
    RankSaid,
    SayToController,
    SayToRank,
    Spawn,
)
from megatron.resilience.protocol.messages import RankReport, StartRanks, ToRank
from tests.sim.process import Process
from tests.sim.world import Pipe

if TYPE_CHECKING:
    from tests.sim.job import Job

RECONNECT_MS = (15.0, 60.0)
GRACE_MS = 40.0


class SimMachine:
    """See the module."""

    def __init__(self, job: Job, machine_id: str, *, rack: str, elastic: bool, starts_before: int = 0) -> None:
        self.job, self.world, self.machine_id = job, job.world, machine_id
        self.rack, self.elastic = rack, elastic
        self.incarnation = starts_before
        self.is_up = False
        self.cut_until_ms = 0.0
        self.processes: dict[int, Process] = {}
        self.connection: int | None = None
        self.to_controller: Pipe | None = None
        self.core: AgentCore
        self.boot()

    def boot(self) -> None:
        """The agent starts: a new incarnation, and no ranks."""
        if self.is_up:
            return
        self.incarnation += 1
        self.is_up = True
        self.core = AgentCore(
            machine_id=self.machine_id,
            incarnation=self.incarnation,
            job="sim",
            machines=self.job.shape.slots,
            ranks_per_machine=self.job.per_machine,
            rack=self.rack,
            elastic=self.elastic,
            capacity=self.job.capacity_of(self.machine_id),
            facts=self.job.agent_facts_of(self.machine_id),
        )
        self.world.after(self.world.between(0, 5), self._connect)

    def crash(self) -> None:
        """The machine loses power: agent, processes and connections are gone without a word."""
        if not self.is_up:
            return
        self.world.say(f"{self.machine_id} crashes")
        self.is_up = False
        self.job.crashed.add(self.machine_id)
        ledger = self.job.controller.ledger
        if self.machine_id in ledger.table and not ledger.ended:
            self.job.excuse = self.job.excuse or f"{self.machine_id} held a slot and crashed"
        self.incarnation_over()
        self.disconnect(tell=False)

    def incarnation_over(self) -> None:
        for _, process in sorted(self.processes.items()):
            if process.alive:
                self.job.ending(process, -9, "its machine crashed")
                process.alive = False
                process.from_machine.cut()
                process.to_machine.cut()
                self.job.ended(process, -9)
        self.processes = {}

    # -------------------------------------------------------------- connection

    def _connect(self) -> None:
        if not self.is_up or self.connection is not None or self.core.stopped:
            return
        controller = self.job.controller
        if not controller.is_up or self.world.now_ms < self.cut_until_ms:
            self.world.after(self.world.between(*RECONNECT_MS), self._connect)
            return
        self.connection, self.to_controller = controller.accept(self)
        self.feed(Connected())

    def disconnect(self, *, tell: bool = True) -> None:
        """The connection breaks: what is under way is lost; both ends notice, each in its time."""
        if self.connection is None:
            return
        if self.to_controller is not None:
            self.to_controller.cut()
        self.job.controller.cut(self.connection)
        self.connection = self.to_controller = None
        if tell and self.is_up:
            self.feed(Disconnected())
            self.world.after(self.world.between(*RECONNECT_MS), self._connect)

    def partition(self, duration_ms: float) -> None:
        """No connection to the controller for a while."""
        self.world.say(f"{self.machine_id} is cut off from the controller")
        self.cut_until_ms = self.world.now_ms + duration_ms
        self.disconnect()

    def controller_said(self, connection: int, message: Any) -> None:
        if self.is_up and self.connection == connection:
            if isinstance(message, StartRanks):
                self.world.say(f"{self.machine_id} <- StartRanks(g{message.generation}, slot={message.slot})")
            elif not isinstance(message, ToRank):
                self.world.say(f"{self.machine_id} <- {type(message).__name__}")
            self.feed(ControllerSaid(message=message))

    # -------------------------------------------------------------- the shell round the core

    def feed(self, event: AgentEvent) -> None:
        for action in self.core.step(event):
            self._act(action)

    def _act(self, action: AgentAction) -> None:
        match action:
            case SayToController(message=message):
                if self.to_controller is not None:
                    self.to_controller.send(message)
            case SayToRank(global_rank=global_rank, command=command):
                process = self.processes.get(global_rank)
                if process is not None:
                    process.from_machine.send(command)
            case Spawn(start=start):
                self._spawn(start)
            case EndRank(global_rank=global_rank, gently=gently, why=why):
                process = self.processes.get(global_rank)
                if process is not None:
                    delay_ms = GRACE_MS if gently else self.world.between(0.1, 5)
                    self.world.after(delay_ms, process.end, -9, why)
            case Hang():
                self.disconnect()

    def _spawn(self, start: StartRanks) -> None:
        for rank in start.ranks:
            process = Process(self.job, self, rank, start.generation, start)
            self.processes[rank] = process
            self.job.processes.append(process)
            self.world.after(self.world.between(1, 20), process.start)

    def rank_said(self, process: Process, report: RankReport) -> None:
        if self.is_up and self.processes.get(process.global_rank) is process:
            self.job.faults.rank_reports(process, report)
            if self.is_up:
                self.feed(RankSaid(global_rank=process.global_rank, generation=process.generation, report=report))

    def process_ended(self, process: Process, exit_code: int, why: str) -> None:
        if self.is_up and self.processes.get(process.global_rank) is process:
            del self.processes[process.global_rank]
            self.feed(
                ProcessEnded(
                    global_rank=process.global_rank, generation=process.generation, exit_code=exit_code, why=why
                )
            )
