"""Whether a migration may begin, and which machines take the slots: what is refused is refused plainly.

Pure; the controller's core asks when a command comes (`why_not`), and again when its turn has come (`choose`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.resilience.protocol.journal import Command, Ledger, Move
from megatron.resilience.protocol.membership import Machine, Membership
from megatron.resilience.protocol.messages import Migrate
from megatron.resilience.protocol.placement import Candidate, Need, place

QUEUE_MAX = 64
"""Migrations that may wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Who moves where; or `why` not."""

    moves: tuple[Move, ...] = ()
    why: str = ""
    is_final: bool = False
    """No machine that becomes free changes that."""


def why_not(migrate: Migrate, ledger: Ledger, members: Membership, slot_need: Need, *, settled: bool = True) -> str:
    """Why a migration is refused at once; empty if it may begin or wait. `settled`: agents had time to attach."""
    if ledger.ended:
        return f"the job is over: {ledger.ended_why}"
    if not ledger.running:
        return "the job is not running yet; try again when it trains"
    if not migrate.leavers:
        return "found no machine to take out, expected at least one --from"
    for named in (migrate.leavers, migrate.to):
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            return f"machine {twice[0]} is named twice"
    if migrate.to and len(migrate.to) != len(migrate.leavers):
        return f"found {len(migrate.to)} --to for {len(migrate.leavers)} --from, expected one for each or none"
    if len(ledger.queue) >= QUEUE_MAX:
        return f"{len(ledger.queue)} migrations wait already, expected at most {QUEUE_MAX}; try again later"
    if not settled:  # who is there is looked at when its turn has come
        return ""
    coming = {move.joiner for move in ledger.switch.moves} if ledger.switch else set()
    for machine_id in (*migrate.leavers, *migrate.to):
        if members.get(machine_id) is None:
            known = ", ".join(sorted(members.machines)) or "none"
            return f"machine {machine_id} is unknown; known machines: {known}"
    for machine_id in migrate.leavers:
        if ledger.slot_of(machine_id) is None and machine_id not in coming:
            return f"machine {machine_id} holds no slot; slots are held by {', '.join(ledger.table)}"
    if ledger.queue or may_become_free(ledger, members):  # free machines are looked at when its turn has come
        return ""
    return choose(Command(command_id="", leavers=migrate.leavers, to=migrate.to), ledger, members, slot_need).why


def may_become_free(ledger: Ledger, members: Membership, refused: frozenset[str] = frozenset()) -> bool:
    """Whether released ranks are still on their way out of a machine, which may then take a slot."""
    return any(
        machine.attached and machine.ranks and ledger.slot_of(machine.machine_id) is None
        for machine in members.machines.values()
        if machine.machine_id not in refused
    )


def need(ledger: Ledger, ranks_per_machine: int) -> Need:
    """What a slot of the job asks of a machine."""
    return Need(ranks=ranks_per_machine, memory_bytes=ledger.slot_memory_bytes, facts=ledger.facts)


def choose(command: Command, ledger: Ledger, members: Membership, slot_need: Need) -> Choice:
    """A joiner for each leaver of `command`, as things are now; lowest slot first."""
    moves: list[Move] = []
    wanted = dict(zip(command.leavers, command.to, strict=True)) if command.to else {}
    slots: list[tuple[int, str]] = []
    for machine_id in command.leavers:
        slot = ledger.slot_of(machine_id)
        if slot is None:
            return Choice(why=f"machine {machine_id} holds no slot any more", is_final=True)
        slots.append((slot, machine_id))
    for slot, leaver in sorted(slots):
        machine = members.get(leaver)
        taken = {move.joiner for move in moves}
        placement = place(
            (_candidate(one, ledger, command, taken) for one in members.machines.values()),
            slot_need,
            rack=machine.rack if machine else "",
            wanted=wanted.get(leaver),
        )
        if placement.machine_id is None:
            return Choice(why=f"no elastic machine is free for slot {slot}: {placement.reason}")
        chosen = members.machines[placement.machine_id]
        moves.append(
            Move(
                slot=slot,
                leaver=leaver,
                joiner=chosen.machine_id,
                incarnation=chosen.incarnation,
                reason=placement.reason,
            )
        )
    return Choice(moves=tuple(moves))


def _candidate(machine: Machine, ledger: Ledger, command: Command, taken: set[str]) -> Candidate:
    return Candidate(
        machine_id=machine.machine_id,
        rack=machine.rack,
        attached=machine.attached,
        busy=_busy(machine, ledger, command, taken),
        failures=ledger.failures.get(machine.machine_id, 0),
        idle_since_ms=machine.idle_since_ms,
        capacity=machine.capacity,
        facts=machine.facts,
    )


def _busy(machine: Machine, ledger: Ledger, command: Command, taken: set[str]) -> str:
    slot = ledger.slot_of(machine.machine_id)
    if slot is not None:
        return f"it holds slot {slot}"
    if machine.machine_id in taken:
        return "it takes another slot in this switch"
    if machine.machine_id in command.refused:
        return "it was refused before for this command"
    if machine.ranks:
        return "ranks of an earlier switch still run there"
    return ""
