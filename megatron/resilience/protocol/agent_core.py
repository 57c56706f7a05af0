"""The agent of one machine, pure: `actions = core.step(event)`. Relays, starts and ends ranks, fences by term.

Its shell holds the stream to the controller and the sockets of the ranks. The agent decides little: it obeys the
highest term it has seen, starts a slot's ranks once, tells a release from a death, and after a new connection says
all that the controller may have missed. Ranks die with their agent: a restarted agent is another incarnation, and
has none. It never ends ranks because the controller is away.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.messages import (
    AgentHello,
    Built,
    Discard,
    FromRank,
    HeldRank,
    LeaveJob,
    Measured,
    Progress,
    RankCommand,
    RankEnded,
    RankReport,
    Rejected,
    Release,
    StartRanks,
    StartRefused,
    StopJob,
    Table,
    TableHeard,
    ToAgent,
    ToController,
    ToRank,
    Welcome,
    WorkerHello,
)

ENDED_KEPT_MAX = 4096
"""Ends of ranks that are told again after a new connection."""


class RankState(enum.Enum):
    """What a rank's process is to its agent."""

    RUNNING = "running"
    ENDING = "ending"


@dataclass(slots=True, kw_only=True)
class HeldProcess:
    """One rank's process on this machine."""

    global_rank: int
    slot: int
    generation: int
    state: RankState = RankState.RUNNING
    hello: WorkerHello | None = None
    built: Built | None = None
    last: RankReport | None = None
    """Its newest report about a switch."""
    measured: Measured | None = None
    """What its newest switch cost it: the controller may be away when it is told."""


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """A stream to a controller stands; its hello may go out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """It is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSaid:
    """Something came over the present stream."""

    message: ToAgent


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSaid:
    """A rank's process reports. `generation`: in which it was started."""

    global_rank: int
    generation: int
    report: RankReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded:
    """A rank's process is gone."""

    global_rank: int
    generation: int
    exit_code: int
    why: str = ""


AgentEvent = Connected | Disconnected | ControllerSaid | RankSaid | ProcessEnded

# ------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True, kw_only=True)
class SayToController:
    """Over the present stream."""

    message: ToController


@dataclass(frozen=True, slots=True, kw_only=True)
class SayToRank:
    """Over the rank's socket; kept for it until it has connected."""

    global_rank: int
    command: RankCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    """Start these ranks; as joiners (isolated) if `generation` is above 1."""

    start: StartRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRank:
    """End a rank's process, that was started in `generation`: `gently` lets it leave by itself first (it was told to),
    within the shell's limit.
    """

    global_rank: int
    generation: int
    gently: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Close the stream; connect again, unless `for_good`."""

    why: str
    for_good: bool


AgentAction = SayToController | SayToRank | Spawn | EndRank | Hang


@dataclass(slots=True, kw_only=True)
class AgentCore:
    """See the module."""

    machine_id: str
    incarnation: int
    job: str
    machines: int
    """Slots of the job."""
    ranks_per_machine: int
    rack: str = ""
    elastic: bool = False
    capacity: Capacity
    facts: Facts
    term: int = 0
    """The highest seen."""
    connected: bool = False
    stopped: str = ""
    """Why the job is over here; empty while it is not."""
    processes: dict[int, HeldProcess] = field(default_factory=dict)
    ended: list[RankEnded] = field(default_factory=list)
    started: set[int] = field(default_factory=set)
    """Generations in which ranks were started here, so that none is started twice."""

    def step(self, event: AgentEvent) -> list[AgentAction]:
        """Takes one event; returns what to do, in order."""
        match event:
            case Connected():
                self.connected = True
                return self._introduce()
            case Disconnected():
                self.connected = False
                return []
            case ControllerSaid(message=message):
                return self._obey(message)
            case RankSaid():
                return self._relay(event)
            case ProcessEnded():
                return self._end(event)

    def _introduce(self) -> list[AgentAction]:
        """HELLO, then what the controller may have missed of each rank."""
        hello = AgentHello(
            machine_id=self.machine_id,
            incarnation=self.incarnation,
            job=self.job,
            machines=self.machines,
            ranks_per_machine=self.ranks_per_machine,
            rack=self.rack,
            elastic=self.elastic,
            capacity=self.capacity,
            facts=self.facts,
            term_seen=self.term,
            ranks=tuple(
                HeldRank(global_rank=held.global_rank, slot=held.slot, generation=held.generation)
                for _, held in sorted(self.processes.items())
            ),
        )
        actions: list[AgentAction] = [SayToController(message=hello)]
        for _, held in sorted(self.processes.items()):
            actions += self._missed(held)
        return actions + [SayToController(message=ended) for ended in self.ended]

    def _missed(self, held: HeldProcess) -> list[AgentAction]:
        return [
            SayToController(message=FromRank(global_rank=held.global_rank, generation=held.generation, report=report))
            for report in (held.hello, held.built, held.last, held.measured)
            if report is not None
        ]

    def _obey(self, message: ToAgent) -> list[AgentAction]:
        if message.term < self.term:
            why = f"found a controller of term {message.term}, expected at least {self.term}: it is an old one"
            return [Hang(why=why, for_good=False)]
        self.term = message.term
        match message:
            case StartRanks():
                return self._start(message)
            case ToRank(global_rank=global_rank, command=command):
                held = self.processes.get(global_rank)
                if held is None or held.state is RankState.ENDING:
                    return []
                return [SayToRank(global_rank=global_rank, command=command)]
            case Table(directory=directory):
                to_ranks = [SayToRank(global_rank=rank, command=directory) for rank in sorted(self.processes)]
                return [*to_ranks, SayToController(message=TableHeard(slot_generations=directory.slot_generations))]
            case Discard(generation=generation, why=why):
                # Joiners alone: what was started in generation 1 holds a slot, and is never discarded.
                return self._end_ranks({generation} - {1}, gently=False, why=why)
            case Release(generation=generation):
                return self._release(generation)
            case StopJob(why=why):
                self.stopped = why
                return self._end_ranks(self.started, gently=False, why=why)
            case Rejected(why=why, final=final):
                return [Hang(why=why, for_good=final)]
            case Welcome():
                return []

    def _start(self, message: StartRanks) -> list[AgentAction]:
        """Starts a slot's ranks once; asked again, it tells where they are."""
        if self.stopped:
            return [self._refuse(message, f"the job is over here: {self.stopped}")]
        mine = [held for held in self.processes.values() if held.generation == message.generation]
        if message.generation in self.started:
            again = [action for held in mine for action in self._missed(held)]
            ends = [ended for ended in self.ended if ended.generation == message.generation]
            return again + [SayToController(message=ended) for ended in ends]
        if self.processes:
            held = sorted(self.processes)
            return [self._refuse(message, f"global ranks {held} of another generation run here")]
        if len(message.ranks) > self.capacity.ranks:
            return [self._refuse(message, f"found {len(message.ranks)} ranks, room for {self.capacity.ranks}")]
        self.started.add(message.generation)
        for rank in message.ranks:
            self.processes[rank] = HeldProcess(global_rank=rank, slot=message.slot, generation=message.generation)
        return [Spawn(start=message)]

    def _refuse(self, message: StartRanks, why: str) -> AgentAction:
        return SayToController(message=StartRefused(generation=message.generation, why=why))

    def _release(self, generation: int) -> list[AgentAction]:
        """Rule P7: the slot has moved in `generation`; what was started for it before leaves by itself."""
        actions: list[AgentAction] = []
        for rank, held in sorted(self.processes.items()):
            if held.generation < generation and held.state is RankState.RUNNING:
                held.state = RankState.ENDING
                actions.append(SayToRank(global_rank=rank, command=LeaveJob(generation=generation)))
                actions.append(
                    EndRank(
                        global_rank=rank,
                        generation=held.generation,
                        gently=True,
                        why=f"slot moved in generation {generation}",
                    )
                )
        return actions

    def _end_ranks(self, generations: set[int], *, gently: bool, why: str) -> list[AgentAction]:
        actions: list[AgentAction] = []
        for rank, held in sorted(self.processes.items()):
            if held.generation in generations and held.state is RankState.RUNNING:
                held.state = RankState.ENDING
                actions.append(EndRank(global_rank=rank, generation=held.generation, gently=gently, why=why))
        return actions

    def _relay(self, event: RankSaid) -> list[AgentAction]:
        held = self.processes.get(event.global_rank)
        if held is None or held.generation != event.generation:
            return []
        match event.report:
            case WorkerHello():
                held.hello = event.report
            case Built():
                held.built = event.report
            case Measured():
                held.measured = event.report
            case Progress():
                pass
            case _:
                held.last = event.report
        if not self.connected:
            return []
        message = FromRank(global_rank=event.global_rank, generation=event.generation, report=event.report)
        return [SayToController(message=message)]

    def _end(self, event: ProcessEnded) -> list[AgentAction]:
        held = self.processes.get(event.global_rank)
        if held is None or held.generation != event.generation:
            return []
        del self.processes[event.global_rank]
        ended = RankEnded(
            global_rank=event.global_rank,
            generation=event.generation,
            exit_code=event.exit_code,
            expected=held.state is RankState.ENDING,
            why=event.why,
        )
        self.ended = [*self.ended, ended][-ENDED_KEPT_MAX:]
        return [SayToController(message=ended)] if self.connected else []
