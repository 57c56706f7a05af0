"""What the controller writes down before it acts, and the state that these entries add up to.

`Ledger.apply` is the only place where durable state changes: the core applies an entry when it makes it, `replay`
applies all of a journal. The store (SQLite, etcd) keeps the bytes of `encode_entry` in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.incidents import FIRST_ITERATION, Incident, add_mark, phases_of


class JournalError(Exception):
    """A journal that cannot be read, or entries that cannot follow each other."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="entry", forbid_unknown_fields=True):
    """Base of all entries; time on the controller's clock."""

    time_ms: float


class Move(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One slot that changes hands."""

    slot: int
    leaver: str
    joiner: str
    incarnation: int
    """Of the joiner's agent: after another start of it, the joiner's ranks are gone (rule R8)."""
    reason: str
    """Why this joiner."""


class JobStarted(Entry, frozen=True, kw_only=True):
    """Generation 1: who holds which slot at first."""

    machines: tuple[str, ...]
    incarnations: tuple[int, ...]


class JobRunning(Entry, frozen=True, kw_only=True):
    """All ranks are built; what a joiner is compared with."""

    facts: Facts
    slot_memory_bytes: int
    endpoints: dict[int, str]
    """Global rank -> where it listens."""


class JobEnded(Entry, frozen=True, kw_only=True):
    """The job is over, well or not."""

    ok: bool
    why: str


class CommandTaken(Entry, frozen=True, kw_only=True):
    """A migration was accepted: it begins now or after those before it."""

    command_id: str
    leavers: tuple[str, ...]
    to: tuple[str, ...]


class CommandEnded(Entry, frozen=True, kw_only=True):
    """It is over."""

    command_id: str
    ok: bool
    text: str


class SwitchBegun(Entry, frozen=True, kw_only=True):
    """`generation` is used from here on and never again (rule P1)."""

    generation: int
    command_id: str
    moves: tuple[Move, ...]


class SwitchPhase(Entry, frozen=True, kw_only=True):
    """A phase has begun, or the controller was away in the present one: for the incident alone."""

    generation: int
    phase: str


class SwitchGo(Entry, frozen=True, kw_only=True):
    """All were READY; the lead is told (rule P3)."""

    generation: int
    endpoints: dict[int, str]
    """Global rank -> where its joiner listens."""


class SwitchWithdraw(Entry, frozen=True, kw_only=True):
    """The lead is asked to give up. `blamed`: machines that failed."""

    generation: int
    why: str
    blamed: tuple[str, ...]


class SwitchAborted(Entry, frozen=True, kw_only=True):
    """It did not happen and will not. `refused`: machines that may not be tried again for this command."""

    generation: int
    why: str
    blamed: tuple[str, ...]
    refused: tuple[str, ...]


class SwitchLeft(Entry, frozen=True, kw_only=True):
    """The lead decided LEAVE: joiners hold the slots."""

    generation: int
    boundary: int


class SwitchDone(Entry, frozen=True, kw_only=True):
    """All joiner ranks run; leavers are released (rule P7)."""

    generation: int


class SwitchMeasured(Entry, frozen=True, kw_only=True):
    """What it cost, once all ranks have told or time is up."""

    generation: int
    incident: Incident


AnyEntry = (
    JobStarted
    | JobRunning
    | JobEnded
    | CommandTaken
    | CommandEnded
    | SwitchBegun
    | SwitchPhase
    | SwitchGo
    | SwitchWithdraw
    | SwitchAborted
    | SwitchLeft
    | SwitchDone
    | SwitchMeasured
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def encode_entry(entry: AnyEntry) -> bytes:
    """Bytes of `entry`."""
    return _ENCODER.encode(entry)


def decode_entry(payload: bytes) -> AnyEntry:
    """The entry in `payload`. Raises JournalError."""
    try:
        return _DECODER.decode(payload)
    except msgspec.DecodeError as error:
        raise JournalError(
            f"found {len(payload)} bytes that are no journal entry ({error}), expected one written by this version of "
            "trainmover; start the job anew with an empty journal"
        ) from error


@dataclass(slots=True, kw_only=True)
class Command:
    """A migration under way or waiting."""

    command_id: str
    leavers: tuple[str, ...]
    to: tuple[str, ...]
    attempts: int = 0
    refused: frozenset[str] = frozenset()
    """Machines that may not be tried again for it."""


@dataclass(slots=True, kw_only=True)
class LedgerSwitch:
    """The switch under way, as far as it is written down."""

    generation: int
    command_id: str
    moves: tuple[Move, ...]
    went: bool = False
    withdrawing: str = ""
    """Why it was withdrawn; empty if it was not."""
    blamed: frozenset[str] = frozenset()
    left: bool = False
    done: bool = False
    endpoints: dict[int, str] = field(default_factory=dict)
    """Of its joiners, from GO on."""
    marks: list[tuple[str, float]] = field(default_factory=list)
    """(phase, time at which it began)"""


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Durable state: the sum of all entries."""

    started: bool = False
    running: bool = False
    ended: bool = False
    ended_ok: bool = False
    ended_why: str = ""
    ended_ms: float = 0.0
    table: list[str] = field(default_factory=list)
    """Slot -> machine that holds it."""
    incarnations: list[int] = field(default_factory=list)
    """Slot -> incarnation of that machine's agent under which its ranks were started."""
    slot_generations: list[int] = field(default_factory=list)
    generation: int = 0
    """The newest ever used."""
    over: int = 1
    """The newest whose switch is over."""
    facts: Facts = field(default_factory=Facts)
    slot_memory_bytes: int = 0
    endpoints: dict[int, str] = field(default_factory=dict)
    """Global rank -> where the process that holds it listens, once the job runs."""
    queue: list[Command] = field(default_factory=list)
    """The first is the one under way."""
    answers: dict[str, CommandEnded] = field(default_factory=dict)
    switch: LedgerSwitch | None = None
    failures: dict[str, int] = field(default_factory=dict)
    boundaries: dict[int, int] = field(default_factory=dict)
    incidents: dict[int, Incident] = field(default_factory=dict)
    """By generation, once over."""
    fulfilled: dict[str, int] = field(default_factory=dict)
    """Command -> generation of the switch that was done for it."""

    def command(self, command_id: str) -> Command | None:
        """The command of that id, if it is not over."""
        return next((command for command in self.queue if command.command_id == command_id), None)

    def slot_of(self, machine_id: str) -> int | None:
        """The slot that a machine holds."""
        return self.table.index(machine_id) if machine_id in self.table else None

    def apply(self, entry: AnyEntry) -> None:
        """Changes the state as `entry` says. Raises JournalError if it cannot follow those before it."""
        match entry:
            case JobStarted(machines=machines, incarnations=incarnations):
                self.expect(not self.started and len(machines) == len(incarnations), entry)
                self.incarnations = list(incarnations)
                self.started, self.table, self.generation = True, list(machines), 1
                self.slot_generations = [1] * len(machines)
            case JobRunning(facts=facts, slot_memory_bytes=memory, endpoints=endpoints):
                self.expect(self.started and not self.running, entry)
                self.running, self.facts, self.slot_memory_bytes = True, facts, memory
                self.endpoints = dict(endpoints)
            case JobEnded(ok=ok, why=why):
                self.expect(not self.ended, entry)
                self.ended, self.ended_ok, self.ended_why = True, ok, why
                self.ended_ms = entry.time_ms
            case CommandTaken(command_id=command_id, leavers=leavers, to=to):
                self.expect(self.command(command_id) is None and command_id not in self.answers, entry)
                self.queue.append(Command(command_id=command_id, leavers=leavers, to=to))
            case CommandEnded(command_id=command_id):
                self.expect(self.command(command_id) is not None, entry)
                self.queue = [command for command in self.queue if command.command_id != command_id]
                self.answers[command_id] = entry
            case SwitchBegun():
                self._begin(entry)
            case _:
                self._advance(entry)

    def _begin(self, entry: SwitchBegun) -> None:
        self.expect(self.switch is None and entry.generation > self.generation, entry)
        self.generation = entry.generation
        self.switch = LedgerSwitch(
            generation=entry.generation,
            command_id=entry.command_id,
            moves=entry.moves,
            marks=[("start joiner", entry.time_ms)],
        )
        command = self.command(entry.command_id)
        if command is not None:
            command.attempts += 1

    def _advance(
        self,
        entry: SwitchPhase | SwitchGo | SwitchWithdraw | SwitchAborted | SwitchLeft | SwitchDone | SwitchMeasured,
    ) -> None:
        switch = self.switch
        if switch is None or switch.generation != entry.generation:
            raise JournalError(f"found {entry}, expected one of the switch under way ({switch})")
        match entry:
            case SwitchPhase(phase=phase):
                add_mark(switch.marks, phase, entry.time_ms)
            case SwitchGo(endpoints=endpoints):
                self.expect(not switch.went, entry)
                switch.went, switch.endpoints = True, endpoints
                switch.marks.append(("wait for boundary", entry.time_ms))
            case SwitchWithdraw(why=why, blamed=blamed):
                self.expect(switch.went and not switch.left, entry)
                switch.withdrawing, switch.blamed = why, switch.blamed | set(blamed)
            case SwitchAborted():
                self.expect(not switch.left, entry)
                self._abort(entry, switch)
            case SwitchLeft(boundary=boundary):
                self.expect(switch.went and not switch.left, entry)
                switch.left = True
                switch.marks.append((FIRST_ITERATION, entry.time_ms))
                self.boundaries[switch.generation] = boundary
                self.endpoints |= switch.endpoints
                for move in switch.moves:
                    self.table[move.slot], self.slot_generations[move.slot] = move.joiner, switch.generation
                    self.incarnations[move.slot] = move.incarnation
            case SwitchDone():
                self.expect(switch.left and not switch.done, entry)
                switch.done, self.over = True, switch.generation
                switch.marks.append(("measure", entry.time_ms))
            case SwitchMeasured(incident=incident):
                self.expect(switch.done, entry)
                self.incidents[switch.generation], self.switch = incident, None
                self.fulfilled[switch.command_id] = switch.generation

    def _abort(self, entry: SwitchAborted, switch: LedgerSwitch) -> None:
        for machine_id in switch.blamed | set(entry.blamed) | set(entry.refused):
            self.failures[machine_id] = self.failures.get(machine_id, 0) + 1
        command = self.command(switch.command_id)
        if command is not None:
            command.refused |= set(entry.refused)
        self.incidents[switch.generation] = incident_of(switch, outcome="aborted", why=entry.why, end_ms=entry.time_ms)
        self.over, self.switch = switch.generation, None

    def all_incidents(self) -> tuple[Incident, ...]:
        """All that are over, oldest first; also the one with which the job has failed."""
        known = dict(self.incidents)
        if self.ended and self.switch is not None:
            generation = self.switch.generation
            boundary = self.boundaries.get(generation, -1)
            known[generation] = incident_of(
                self.switch, outcome="failed", why=self.ended_why, end_ms=self.ended_ms, boundary=boundary
            )
        return tuple(known[generation] for generation in sorted(known))

    def expect(self, holds: bool, entry: AnyEntry) -> None:
        """Raises JournalError unless `holds`."""
        if not holds:
            raise JournalError(f"found {entry}, which cannot follow the entries before it; the journal is damaged")


def incident_of(switch: LedgerSwitch, *, outcome: str, why: str = "", end_ms: float, boundary: int = -1) -> Incident:
    """The incident of a switch, from what is written down of it."""
    return Incident(
        incident_id=f"g{switch.generation}",
        kind="migration",
        outcome=outcome,
        why=why,
        leavers=tuple(move.leaver for move in switch.moves),
        joiners=tuple(move.joiner for move in switch.moves),
        reasons=tuple(move.reason for move in switch.moves),
        slots=tuple(move.slot for move in switch.moves),
        generation=switch.generation,
        boundary=boundary,
        phases=phases_of(switch.marks, end_ms),
    )
