"""Who moves where, or why not: several leavers, machines that are busy, and what has changed since a command came."""

from __future__ import annotations

from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.journal import Command, JobRunning, JobStarted, Ledger
from megatron.resilience.protocol.membership import Membership
from megatron.resilience.protocol.messages import AgentHello, HeldRank, Migrate
from megatron.resilience.protocol.refusals import QUEUE_MAX, choose, need, why_not


def state(*elastic: AgentHello) -> tuple[Ledger, Membership]:
    ledger, members = Ledger(), Membership()
    ledger.apply(JobStarted(time_ms=0.0, machines=("m0", "m1"), incarnations=(1, 1)))
    ledger.apply(JobRunning(time_ms=0.0, facts=Facts(torch="2"), slot_memory_bytes=10, endpoints={}))
    for number, hello in enumerate([machine("m0"), machine("m1"), *elastic]):
        members.attach(number, hello, float(number))
    return ledger, members


def machine(machine_id: str, *, torch: str = "2", ranks: int = 1, held: int | None = None) -> AgentHello:
    return AgentHello(
        machine_id=machine_id,
        incarnation=1,
        job="j",
        machines=2,
        ranks_per_machine=1,
        elastic=True,
        capacity=Capacity(ranks=ranks, memory_bytes=10),
        facts=Facts(torch=torch),
        ranks=() if held is None else (HeldRank(global_rank=held, slot=0, generation=1),),
    )


def chosen(*leavers: str, to: tuple[str, ...] = (), elastic: tuple[AgentHello, ...] = ()) -> tuple[list[str], str]:
    ledger, members = state(*elastic)
    command = Command(command_id="c", leavers=leavers, to=to)
    choice = choose(command, ledger, members, need(ledger, 1))
    return [f"{move.slot}: {move.leaver} -> {move.joiner}" for move in choice.moves], choice.why


def test_each_leaver_gets_a_machine_of_its_own() -> None:
    moves, why = chosen("m1", "m0", elastic=(machine("m2"), machine("m3")))
    assert (moves, why) == (["0: m0 -> m2", "1: m1 -> m3"], "")
    moves, why = chosen("m1", "m0", to=("m2", "m3"), elastic=(machine("m2"), machine("m3")))
    assert moves == ["0: m0 -> m3", "1: m1 -> m2"]
    moves, why = chosen("m0", "m1", elastic=(machine("m2"),))
    assert moves == []
    assert "m2: it takes another slot in this switch" in why


def test_why_no_machine_can_be_had_is_said_for_each() -> None:
    odd = (machine("m2", torch="3"), machine("m3", ranks=0), machine("m4", held=0))
    moves, why = chosen("m1", elastic=odd)
    assert moves == []
    assert why.startswith("no elastic machine is free for slot 1: ")
    for text in ("m0: it holds slot 0", "torch: found 3", "m3: it holds 0 ranks", "m4: ranks of an earlier switch"):
        assert text in why


def test_a_leaver_that_has_lost_its_slot_meanwhile_is_told() -> None:
    assert chosen("m7")[1] == "machine m7 holds no slot any more"


def test_a_full_queue_refuses() -> None:
    ledger, members = state(machine("m2"))
    ledger.queue = [Command(command_id=str(n), leavers=("m1",), to=()) for n in range(QUEUE_MAX)]
    migrate = Migrate(command_id="c", leavers=("m1",))
    assert "wait already" in why_not(migrate, ledger, members, need(ledger, 1))
    ledger.queue.pop()
    assert why_not(migrate, ledger, members, need(ledger, 1)) == ""
