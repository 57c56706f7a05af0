"""The controller in the simulation: a thin shell round `ControllerCore`, with a journal that survives its crashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.resilience.protocol import invariants
from megatron.resilience.protocol.controller_core import ControllerCore, replay
from megatron.resilience.protocol.controller_words import (
    AgentLost,
    AgentSaid,
    Answer,
    Close,
    ControllerAction,
    ControllerEvent,
    JobSpec,
    Journal,
    Limits,
    Record,
    Send,
    Tick,
    UserAsked,
)
from megatron.resilience.protocol.journal import AnyEntry, Ledger, decode_entry, encode_entry
from megatron.resilience.protocol.messages import Party, UserCommand, decode, encode
from tests.sim.world import Pipe

if TYPE_CHECKING:
    from tests.sim.job import Job
    from tests.sim.machine import SimMachine

TICK_MS = 40.0
LIMITS = Limits(
    build_ms=2_000.0,
    prepare_ms=1_500.0,
    go_ms=3_000.0,
    running_ms=8_000.0,
    measure_ms=400.0,
    agent_lost_ms=900.0,
    settle_ms=250.0,
)


class SimController:
    """See the module. `crash_at` is asked after each entry is on disk, before anything that depends on it."""

    def __init__(self, job: Job, spec: JobSpec) -> None:
        self.job, self.world, self.spec = job, job.world, spec
        self.journal: list[bytes] = []
        self.term = 0
        self.is_up = False
        self.crash_at: Callable[[int, AnyEntry], bool] = lambda number, entry: False
        self.downtime_ms: Callable[[], float] = lambda: 100.0
        self.stalls = 0.0
        self.core: ControllerCore
        self._connections: dict[int, tuple[SimMachine, Pipe]] = {}
        self._next_connection = 0
        self.boot()

    @property
    def entries(self) -> list[AnyEntry]:
        return [decode_entry(payload) for payload in self.journal]

    @property
    def ledger(self) -> Ledger:
        return self.core.desk.ledger

    def boot(self) -> None:
        self.term += 1
        self.is_up = True
        if self.term > 1:
            self.world.say(f"controller is back, term {self.term}")
        self.core = replay(self.spec, self.entries, term=self.term, limits=LIMITS)
        self._tick(self.term)

    def crash(self) -> None:
        """It dies; what it sent is under way or lost. It comes back after a while."""
        if not self.is_up:
            return
        self.world.say("controller dies")
        self.is_up = False
        for machine, pipe in list(self._connections.values()):
            pipe.cut()
            self.world.after(self.world.between(0.1, 5), machine.disconnect)
        self._connections = {}
        self.world.after(self.downtime_ms(), self.boot)

    def _tick(self, term: int) -> None:
        if self.is_up and self.term == term:
            self.feed(Tick(time_ms=self.world.now_ms))
            self.world.after(TICK_MS, self._tick, term)

    # -------------------------------------------------------------- connections

    def accept(self, machine: SimMachine) -> tuple[int, Pipe]:
        """A new connection: (its number, the pipe to the controller)."""
        self._next_connection += 1
        number = self._next_connection
        self._connections[number] = (
            machine,
            Pipe(self.world, lambda message: machine.controller_said(number, message), stalls=self.stalls),
        )
        return number, Pipe(self.world, lambda message: self._hear(number, message), stalls=self.stalls)

    def cut(self, number: int) -> None:
        """The other side is gone; this one notices a little later."""
        known = self._connections.get(number)
        if known is not None:
            known[1].cut()
            self.world.after(self.world.between(0.1, 30), self._lost, number)

    def _lost(self, number: int) -> None:
        if self._connections.pop(number, None) is not None:
            self.feed(AgentLost(connection=number, time_ms=self.world.now_ms))

    def _hear(self, number: int, message: Any) -> None:
        if number in self._connections:
            payload = encode(message)
            heard = decode(payload, sender=Party.AGENT, receiver=Party.CONTROLLER)
            self.feed(AgentSaid(connection=number, message=heard, time_ms=self.world.now_ms))

    def ask(self, client: int, command: UserCommand) -> None:
        if self.is_up:
            self.feed(UserAsked(client=client, command=command, time_ms=self.world.now_ms))

    # -------------------------------------------------------------- the shell round the core

    def feed(self, event: ControllerEvent) -> None:
        if not self.is_up:
            return
        term = self.term
        for action in self.core.step(event):
            if self.is_up and self.term == term:  # it may have died at a journal entry
                self._act(action)

    def _act(self, action: ControllerAction) -> None:
        match action:
            case Journal(entry=entry):
                self.journal.append(encode_entry(entry))
                self.world.say(f"controller writes {_entry_text(entry)}")
                invariants.check_fresh(self.entries if type(entry).__name__ == "SwitchBegun" else [])
                if self.crash_at(len(self.journal), entry):
                    self.crash()
            case Send(connection=connection, message=message):
                known = self._connections.get(connection)
                if known is not None:
                    payload = encode(message)
                    known[1].send(decode(payload, sender=Party.CONTROLLER, receiver=Party.AGENT))
            case Close(connection=connection):
                known = self._connections.pop(connection, None)
                if known is not None:
                    known[1].cut()
                    machine = known[0]
                    if machine.connection == connection:
                        self.world.after(self.world.between(0.1, 5), machine.disconnect)
            case Answer(client=client, message=answer):
                self.job.users.hear(client, answer)
            case Record():
                pass


def _entry_text(entry: AnyEntry) -> str:
    shown = []
    for name in entry.__struct_fields__:
        value = getattr(entry, name)
        if name in ("time_ms", "facts", "incident") or value in ("", ()):
            continue
        if name == "moves":
            value = ", ".join(f"slot {m.slot}: {m.leaver} -> {m.joiner} ({m.reason})" for m in value)
        shown.append(f"g{value}" if name == "generation" else f"{name}={value}")
    return f"{type(entry).__name__}({', '.join(shown)})"
