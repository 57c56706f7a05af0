"""Which machines there are, over which connection each is reached, and what runs there. Kept by the controller's core.

A connection is a number of the shell's. An agent that attaches again takes its newest connection; what the older one
still says, or that it was lost, is not listened to. Another incarnation is turned away while the known one is
connected, so that an agent which was started by mistake takes nobody's place. Incarnations are told apart, never
compared: the clock they are drawn from may be set back. What another start means for ranks is judged by the journal
(rule R8's fencing).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.messages import AgentHello


@dataclass(slots=True, kw_only=True)
class Machine:
    """One machine, as its agent last told."""

    machine_id: str
    incarnation: int
    rack: str
    elastic: bool
    capacity: Capacity
    facts: Facts
    connection: int | None
    """None while its agent is not connected."""
    ranks: dict[int, int] = field(default_factory=dict)
    """Global rank -> generation in which its process was started."""
    is_told: bool = False
    """The end of the job was sent to it."""
    idle_since_ms: float = 0.0
    lost_since_ms: float = 0.0

    @property
    def attached(self) -> bool:
        """Its agent is connected."""
        return self.connection is not None


@dataclass(slots=True, kw_only=True)
class Membership:
    """All machines that ever attached."""

    machines: dict[str, Machine] = field(default_factory=dict)
    _reached: dict[int, Machine] = field(default_factory=dict)
    """Connection -> whom `of` has found behind it; it may have taken another since."""

    @property
    def beginners(self) -> list[Machine]:
        """Those that may hold the first slots, and are here."""
        return [machine for machine in self.machines.values() if machine.attached and not machine.elastic]

    def attach(self, connection: int, hello: AgentHello, time_ms: float) -> tuple[Machine | None, str]:
        """Takes a hello: (the machine, "") or (None, why it is turned away)."""
        known = self.machines.get(hello.machine_id)
        if known is not None and known.attached and hello.incarnation != known.incarnation:
            return None, (
                f"found another agent of machine {hello.machine_id} connected, expected one agent a machine; set "
                "another TRAINMOVER_MACHINE for this one, or end the other"
            )
        if known is None:
            known = self._add(connection, hello, time_ms)
        else:
            if known.incarnation != hello.incarnation:
                known.idle_since_ms = time_ms
            known.incarnation, known.connection = hello.incarnation, connection
            known.rack, known.elastic = hello.rack, hello.elastic
            known.capacity, known.facts = hello.capacity, hello.facts
        known.ranks = {held.global_rank: held.generation for held in hello.ranks}
        return known, ""

    def _add(self, connection: int, hello: AgentHello, time_ms: float) -> Machine:
        machine = Machine(
            machine_id=hello.machine_id,
            incarnation=hello.incarnation,
            rack=hello.rack,
            elastic=hello.elastic,
            capacity=hello.capacity,
            facts=hello.facts,
            connection=connection,
            idle_since_ms=time_ms,
        )
        self.machines[hello.machine_id] = machine
        return machine

    def of(self, connection: int) -> Machine | None:
        """The machine that is reached over `connection`; None if it has taken another or is unknown."""
        known = self._reached.get(connection)
        if known is None or known.connection != connection:
            known = next((machine for machine in self.machines.values() if machine.connection == connection), None)
            if known is not None:
                self._reached[connection] = known
        return known

    def lose(self, connection: int, time_ms: float) -> Machine | None:
        """The connection is gone; the machine whose present one it was."""
        machine = self.of(connection)
        self._reached.pop(connection, None)
        if machine is not None:
            machine.connection, machine.lost_since_ms = None, time_ms
        return machine

    def get(self, machine_id: str) -> Machine | None:
        """The machine of that id."""
        return self.machines.get(machine_id)
