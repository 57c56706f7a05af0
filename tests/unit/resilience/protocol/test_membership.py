"""Machines, their connections and incarnations."""

from __future__ import annotations

import pytest

from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.membership import Membership
from megatron.resilience.protocol.messages import AgentHello, HeldRank


def hello(incarnation: int = 1, *ranks: int) -> AgentHello:
    return AgentHello(
        machine_id="m1",
        incarnation=incarnation,
        job="j",
        machines=2,
        ranks_per_machine=1,
        capacity=Capacity(ranks=1, memory_bytes=incarnation),
        facts=Facts(),
        ranks=tuple(HeldRank(global_rank=rank, slot=0, generation=1) for rank in ranks),
    )


def test_the_newest_connection_is_the_one() -> None:
    members = Membership()
    members.attach(1, hello(), 0.0)
    members.attach(2, hello(1, 5), 1.0)
    assert members.of(1) is None
    assert members.lose(1, 2.0) is None
    machine = members.of(2)
    assert machine is not None
    assert (machine.attached, machine.ranks) == (True, {5: 1})
    assert members.lose(2, 3.0) is machine
    assert (machine.attached, machine.lost_since_ms) == (False, 3.0)


def test_a_connection_is_looked_up_once() -> None:
    members = Membership()
    members.attach(1, hello(), 0.0)
    machine = members.of(1)
    assert machine is members.get("m1")
    members.machines = {}  # nobody to look through
    assert members.of(1) is machine
    members.machines = {"m1": machine} if machine else {}
    members.attach(2, hello(), 0.0)
    assert members.of(1) is None
    assert members.of(2) is members.get("m1")
    members.lose(2, 0.0)
    assert members.of(2) is None


@pytest.mark.parametrize("other", [1, 3])
def test_another_start_is_turned_away_until_the_connection_is_lost_and_idle_from_then(other: int) -> None:
    members = Membership()
    members.attach(1, hello(2), 0.0)
    machine, why = members.attach(2, hello(other), 1.0)
    assert machine is None
    assert "found another agent of machine m1 connected, expected one agent a machine" in why
    assert members.of(1) is not None
    members.lose(1, 2.0)
    machine, why = members.attach(3, hello(other), 4.0)
    assert machine is not None
    assert (why, machine.incarnation, machine.idle_since_ms) == ("", other, 4.0)
    assert machine.capacity.memory_bytes == other
    assert members.get("m1") is machine
    assert members.get("m9") is None
