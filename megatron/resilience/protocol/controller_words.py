"""The controller's events, actions, limits and job: what its shell feeds in and carries out.

Actions must be carried out in their order, and what a Journal action writes must be on disk before the next one: then
the controller may die anywhere, and `replay` finds at most a decision that was not yet told.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.resilience.protocol.journal import AnyEntry, Ledger
from megatron.resilience.protocol.membership import Membership
from megatron.resilience.protocol.messages import (
    RankCommand,
    StartRanks,
    StopJob,
    ToAgent,
    ToController,
    ToRank,
    UserAnswer,
    UserCommand,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The job that a controller runs."""

    job: str
    slots: int
    ranks_per_machine: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.slots * self.ranks_per_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long each part of a switch may last, in ms, and how often it is tried."""

    build_ms: float = 600_000.0
    """From a switch's begin until all joiner ranks are built."""
    prepare_ms: float = 60_000.0
    """From then until all are READY."""
    go_ms: float = 600_000.0
    """From GO until the lead has cast with success; saves and evaluations are waited for."""
    running_ms: float = 900_000.0
    """From LEAVE until all joiner ranks run, or any rank is past the boundary; then the job is stopped. Longer than a
    joiner in doubt waits for its leaver (`worker/limits.py`) and the iteration after that.
    """
    measure_ms: float = 120_000.0
    """From then until all ranks have told what it cost, which takes them an iteration, with the save or evaluation that
    may follow; three more are allowed for.
    """
    agent_lost_ms: float = 30_000.0
    """How long a joiner's agent may be away before LEAVE."""
    settle_ms: float = 5_000.0
    """After a restart of the controller, how long agents have to attach again before a queued migration begins."""
    release_ms: float = 60_000.0
    """How long a migration waits for released ranks to leave the machine that it needs, or for its leaver's agent."""
    attempts_max: int = 5
    """Switches that one migration may try."""


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSaid:
    """A message came over a connection."""

    connection: int
    message: ToController
    time_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """A connection is gone."""

    connection: int
    time_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAsked:
    """A user's command; `client` is where answers go."""

    client: int
    command: UserCommand
    time_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLost:
    """A user's connection is gone; the commands go on."""

    client: int
    time_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed; the shell says so several times a second."""

    time_ms: float


ControllerEvent = AgentSaid | AgentLost | UserAsked | UserLost | Tick


# ------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """Write down, durably, before anything after it."""

    entry: AnyEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """To the agent of `machine_id`, over `connection`; nothing if that is gone: what matters is said again."""

    connection: int
    machine_id: str
    message: ToAgent


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """End a connection, after what was sent over it."""

    connection: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To a user."""

    client: int
    message: UserAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line of the event log: `BEGIN`, `INSTANT` or `END` of what `incident_id` names."""

    kind: str
    incident_id: str
    name: str
    time_ms: float
    text: str


ControllerAction = Journal | Send | Close | Answer | Record


# ------------------------------------------------------------------ what the parts of the core share


@dataclass(slots=True, kw_only=True)
class Desk:
    """What the parts of the core work on: durable ledger, members, and the actions of the present step."""

    spec: JobSpec
    limits: Limits
    term: int
    ledger: Ledger = field(default_factory=Ledger)
    members: Membership = field(default_factory=Membership)
    endpoints: dict[int, str] = field(default_factory=dict)
    """Global rank -> endpoint of the process that holds it."""
    clients: dict[str, set[int]] = field(default_factory=dict)
    """Command -> users who wait for it."""
    progress: tuple[int, float] = (0, 0.0)
    """The newest iteration that a rank told of, and its median iteration in ms."""
    now_ms: float = 0.0
    actions: list[ControllerAction] = field(default_factory=list)

    @property
    def directory_is_whole(self) -> bool:
        """It is known where each rank listens: from when the job runs, whatever happens to the controller."""
        return len(self.endpoints) == self.spec.world_size

    def journal(self, entry: AnyEntry) -> None:
        """Decides: writes down and applies."""
        self.ledger.apply(entry)
        self.actions.append(Journal(entry=entry))

    def send(self, machine_id: str, message: ToAgent) -> None:
        """To a machine, if its agent is connected."""
        machine = self.members.get(machine_id)
        if machine is not None and machine.connection is not None:
            if isinstance(message, StartRanks):  # it is busy from now on; the agent tells of the end, or refuses
                machine.ranks.update(dict.fromkeys(message.ranks, message.generation))
            machine.is_told = machine.is_told or isinstance(message, StopJob)
            self.actions.append(Send(connection=machine.connection, machine_id=machine_id, message=message))

    def to_rank(self, machine_id: str, global_rank: int, command: RankCommand) -> None:
        """To a rank on a machine."""
        self.send(machine_id, ToRank(term=self.term, global_rank=global_rank, command=command))

    def tell(self, command_id: str, message: UserAnswer) -> None:
        """To all users who wait for a command."""
        for client in sorted(self.clients.get(command_id, ())):
            self.actions.append(Answer(client=client, message=message))

    def record(self, kind: str, incident_id: str, name: str, text: str = "") -> None:
        """Into the event log."""
        self.actions.append(Record(kind=kind, incident_id=incident_id, name=name, time_ms=self.now_ms, text=text))

    def slot_of(self, global_rank: int) -> int:
        """The slot of a rank."""
        return global_rank // self.spec.ranks_per_machine

    def ranks_of(self, slot: int) -> tuple[int, ...]:
        """The ranks of a slot."""
        first = slot * self.spec.ranks_per_machine
        return tuple(range(first, first + self.spec.ranks_per_machine))
