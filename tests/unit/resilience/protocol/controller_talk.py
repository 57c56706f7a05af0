"""A controller's core spoken to by hand: machines that answer what a test tells them to, and what the core said."""

from __future__ import annotations

from typing import TypeVar

from megatron.resilience.protocol.controller_core import ControllerCore, replay
from megatron.resilience.protocol.controller_words import (
    AgentLost,
    AgentSaid,
    Answer,
    ControllerAction,
    ControllerEvent,
    JobSpec,
    Journal,
    Limits,
    Send,
    Tick,
    UserAsked,
)
from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.journal import AnyEntry
from megatron.resilience.protocol.messages import (
    AgentHello,
    Built,
    FromRank,
    HeldRank,
    Message,
    Migrate,
    RankEnded,
    RankReport,
    TableHeard,
    ToController,
    ToRank,
    UserCommand,
    WorkerHello,
)

SPEC = JobSpec(job="j", slots=2, ranks_per_machine=1)
LIMITS = Limits(build_ms=1_000, prepare_ms=1_000, go_ms=1_000, running_ms=1_000, measure_ms=100, agent_lost_ms=500)
FACTS = Facts(torch="2", model_digest="d")
Kind = TypeVar("Kind", bound=Message)


class Talk:
    """Machines m0 and m1 hold the slots (rank = slot), m2 and m3 are elastic; connection = number of the machine."""

    def __init__(self) -> None:
        self.core = ControllerCore(SPEC, term=1, limits=LIMITS)
        self.now_ms = 0.0
        self.entries: list[AnyEntry] = []
        self.last: list[ControllerAction] = []

    def feed(self, event: ControllerEvent) -> list[ControllerAction]:
        self.last = self.core.step(event)
        self.entries += [action.entry for action in self.last if isinstance(action, Journal)]
        return self.last

    def says(self, machine: int, message: ToController) -> list[ControllerAction]:
        return self.feed(AgentSaid(connection=machine, message=message, time_ms=self.now_ms))

    def hello(
        self,
        machine: int,
        *ranks: tuple[int, int],
        incarnation: int = 1,
        term: int = 0,
        memory: int = 100,
        connection: int | None = None,
    ) -> list[ControllerAction]:
        return self.says(
            machine if connection is None else connection,
            AgentHello(
                machine_id=f"m{machine}",
                incarnation=incarnation,
                job=SPEC.job,
                machines=SPEC.slots,
                ranks_per_machine=SPEC.ranks_per_machine,
                elastic=machine > 1,
                capacity=Capacity(ranks=1, memory_bytes=memory),
                facts=Facts(torch="2"),
                term_seen=term,
                ranks=tuple(HeldRank(global_rank=rank, slot=rank, generation=g) for rank, g in ranks),
            ),
        )

    def report(self, machine: int, rank: int, report: RankReport, *, started: int = 1) -> list[ControllerAction]:
        return self.says(machine, FromRank(global_rank=rank, generation=started, report=report))

    def listen(self, machine: int, rank: int, generation: int, facts: Facts = FACTS) -> list[ControllerAction]:
        hello = WorkerHello(generation=generation, endpoint=f"h{machine}:{rank}", facts=facts)
        return self.report(machine, rank, hello, started=generation)

    def build(self, machine: int, rank: int, generation: int, facts: Facts = FACTS) -> list[ControllerAction]:
        endpoint = f"h{machine}:{rank}"
        self.listen(machine, rank, generation, facts)
        built = Built(generation=generation, endpoint=endpoint, facts=facts, memory_bytes=50)
        return self.report(machine, rank, built, started=generation)

    def heard(self, *machines: int) -> list[ControllerAction]:
        """They have given the present table to their ranks."""
        for machine in machines:
            self.says(machine, TableHeard(slot_generations=tuple(self.core.desk.ledger.slot_generations)))
        return self.last

    def end(self, machine: int, rank: int, generation: int, code: int = -9) -> list[ControllerAction]:
        ended = RankEnded(global_rank=rank, generation=generation, exit_code=code, expected=False, why="killed")
        return self.says(machine, ended)

    def lose(self, machine: int) -> list[ControllerAction]:
        return self.feed(AgentLost(connection=machine, time_ms=self.now_ms))

    def wait(self, by_ms: float) -> list[ControllerAction]:
        self.now_ms += by_ms
        return self.feed(Tick(time_ms=self.now_ms))

    def ask(self, command: UserCommand, client: int = 9) -> list[ControllerAction]:
        return self.feed(UserAsked(client=client, command=command, time_ms=self.now_ms))

    def migrate(self, *leavers: str, to: tuple[str, ...] = (), command_id: str = "c1") -> list[ControllerAction]:
        return self.ask(Migrate(command_id=command_id, leavers=leavers, to=to))

    def restart(self) -> None:
        self.core = replay(SPEC, self.entries, term=self.core.desk.term + 1, limits=LIMITS)

    def said(self, kind: type[Kind]) -> list[tuple[str, Kind]]:
        """What was sent of that kind in the last step, to machines or to ranks on them."""
        found: list[tuple[str, Kind]] = []
        for action in self.last:
            if isinstance(action, Send):
                message: object = action.message
                if isinstance(message, ToRank):
                    message = message.command
                if isinstance(message, kind):
                    found.append((action.machine_id, message))
        return found

    def answers(self, kind: type[Kind]) -> list[Kind]:
        return [a.message for a in self.last if isinstance(a, Answer) and isinstance(a.message, kind)]


def running(incarnation: int = 1) -> Talk:
    """A job that trains, with two elastic machines."""
    talk = Talk()
    for machine in range(4):
        talk.hello(machine, incarnation=incarnation)
    for rank in range(2):
        talk.build(rank, rank, 1)
    return talk


def going() -> Talk:
    """m1 leaves for m2 in generation 2: all are READY and GO is with the lead, rank 1; rank 0 is linked."""
    from megatron.resilience.protocol.messages import Ready

    talk = running()
    talk.migrate("m1")
    talk.build(2, 1, 2)
    talk.report(1, 1, Ready(generation=2, linked=(0,), transfer="h1:t"))
    talk.report(2, 1, Ready(generation=2), started=2)
    talk.report(0, 0, Ready(generation=2, linked=(1,)))
    return talk
