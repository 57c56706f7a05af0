"""What one process alone can do of a switch: join, be told its place, go live; and what is refused out of turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainmover_ext
from tests.unit.trainmover_ext.conftest import RANK
from trainmover_ext import LinkTally, SwitchError, SwitchPhase, SwitchTally


def endpoint_of_another(**changes: object) -> str:
    fields = json.loads(trainmover_ext.endpoint())
    return json.dumps({**fields, "incarnation": fields["incarnation"] + 1, "address": "127.0.0.1:9", **changes})


def handover_with(**places: list[int]) -> str:
    names = [stats["name"] for stats in trainmover_ext.communicator_stats()]
    return json.dumps({"recovery": 1, "places": {**{name: [7, 3, 5] for name in names}, **places}})


def test_a_tally_adds_up_its_communicators() -> None:
    tally = SwitchTally(
        generation=3,
        communicators={
            "a": LinkTally(kept=1, replaced=2, dropped=0),
            "b": LinkTally(kept=4, replaced=1, dropped=1),
        },
    )
    assert tally.links == LinkTally(kept=5, replaced=3, dropped=1)


@pytest.mark.usefixtures("alone")
class TestJoiner:
    def test_it_takes_the_leavers_place_and_goes_live(self) -> None:
        others = {rank: endpoint_of_another() for rank in range(8)}
        trainmover_ext.join_switch(4, others, {2: 3})
        assert trainmover_ext.switch_state(4).phase is SwitchPhase.READY
        assert trainmover_ext.linked_ranks() == ()
        trainmover_ext.go_live(4, handover_with(), {2: endpoint_of_another(), RANK: trainmover_ext.endpoint()})
        told = json.loads(trainmover_ext.handover())
        assert set(map(tuple, told["places"].values())) == {(7, 3, 5)}
        assert told["recovery"] == 1
        assert trainmover_ext.generation() == 1
        trainmover_ext.abort_collectives(reason="a test")
        with pytest.raises(trainmover_ext.CollectiveAborted):
            dist.barrier()

    def test_a_later_switch_may_follow_an_abort_and_an_earlier_one_may_not(self) -> None:
        trainmover_ext.join_switch(4, {})
        trainmover_ext.abort_switch(3)
        assert trainmover_ext.switch_state(4).phase is SwitchPhase.READY
        trainmover_ext.abort_switch(4)
        assert trainmover_ext.switch_state(4).reason == "aborted"
        with pytest.raises(SwitchError, match="expected a later one"):
            trainmover_ext.join_switch(4, {})
        trainmover_ext.join_switch(5, {})
        trainmover_ext.go_live(5, handover_with())

    @pytest.mark.parametrize(
        "text", ["", "{}", "[1]", '{"recovery": "x", "places": {}}', '{"recovery": 1, "places": {"a": [1, 2]}}']
    )
    def test_a_handover_that_is_none_is_refused(self, text: str) -> None:
        trainmover_ext.join_switch(4, {})
        for refuses in (trainmover_ext.check_handover, trainmover_ext.go_live):
            with pytest.raises(SwitchError, match="expected the text of handover"):
                refuses(4, text)

    def test_groups_that_the_joiner_has_not_made_are_named(self) -> None:
        trainmover_ext.join_switch(4, {})
        for refuses in (trainmover_ext.check_handover, trainmover_ext.go_live):
            with pytest.raises(SwitchError, match="has a group other"):
                refuses(4, handover_with(other=[0, 0, 0]))
            with pytest.raises(SwitchError, match="expected an earlier one"):
                refuses(4, handover_with().replace('"recovery": 1', '"recovery": 4'))
            refuses(4, handover_with())

    def test_only_going_live_makes_it_live(self) -> None:
        trainmover_ext.join_switch(4, {})
        with pytest.raises(SwitchError, match="go_live makes it live"):
            trainmover_ext.set_mode("live")
        dist.all_reduce(torch.ones(3))


OUT_OF_TURN: dict[str, Callable[[], Any]] = {
    "prepare": lambda: trainmover_ext.prepare_switch(4, {1: endpoint_of_another()}),
    "state": lambda: trainmover_ext.switch_state(4),
    "commit": lambda: trainmover_ext.commit_switch(4),
    "hold": lambda: trainmover_ext.hold_links(4),
    "leave": lambda: trainmover_ext.leave_switch(4),
    "go live": lambda: trainmover_ext.go_live(4, handover_with()),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("call", OUT_OF_TURN)
def test_nothing_else_is_a_joiners_turn(call: str) -> None:
    with pytest.raises(SwitchError):
        OUT_OF_TURN[call]()
    trainmover_ext.abort_switch(4)
    dist.all_reduce(torch.ones(3))


def test_a_live_rank_holds_and_takes_it_back_or_leaves(start_single: Callable[[], None]) -> None:
    start_single()
    dist.all_reduce(torch.ones(3))
    with pytest.raises(SwitchError, match="this process is live"):
        trainmover_ext.join_switch(4, {})
    with pytest.raises(SwitchError, match="hold_links comes first"):
        trainmover_ext.leave_switch(4)
    assert trainmover_ext.hold_links(4) == ()
    with pytest.raises(SwitchError, match="in another switch"):
        trainmover_ext.hold_links(5)
    trainmover_ext.abort_switch(4)
    with pytest.raises(SwitchError, match="never used twice"):
        trainmover_ext.hold_links(4)
    dist.all_reduce(torch.ones(3))
    assert trainmover_ext.hold_links(6) == ()
    trainmover_ext.leave_switch(6)
    with pytest.raises(SwitchError, match="another process's by now"):
        dist.all_reduce(torch.ones(3))


def test_a_move_of_nobody_or_of_oneself_is_refused(start_single: Callable[[], None]) -> None:
    start_single()
    with pytest.raises(SwitchError, match="expected at least one"):
        trainmover_ext.prepare_switch(2, {})
    with pytest.raises(SwitchError, match="cannot stay and move"):
        trainmover_ext.prepare_switch(2, {0: endpoint_of_another()})
    with pytest.raises(SwitchError, match="add_endpoints comes first"):
        trainmover_ext.prepare_switch(2, {1: endpoint_of_another()})
    trainmover_ext.add_endpoints({1: endpoint_of_another()})
    with pytest.raises(SwitchError, match="holds it already"):
        trainmover_ext.prepare_switch(2, {1: endpoint_of_another()})
    trainmover_ext.prepare_switch(2, {1: endpoint_of_another(incarnation=5)})
    assert trainmover_ext.switch_state(2).phase is SwitchPhase.READY  # there is no link that would need another
    tally = trainmover_ext.commit_switch(2)
    assert tally.links == LinkTally(kept=0, replaced=0, dropped=0)
    assert len(tally.communicators) == 1
    with pytest.raises(SwitchError, match="the latest known here"):
        trainmover_ext.resume(2)
    trainmover_ext.resume(3)


def test_endpoints_of_a_generation_to_be_resumed_come_with_it_and_not_before(start_single: Callable[[], None]) -> None:
    """A link that is made between the two would be dropped by the second, and its other end think this rank dead."""
    start_single()
    trainmover_ext.add_endpoints({1: endpoint_of_another()})
    trainmover_ext.add_endpoints({1: endpoint_of_another(incarnation=5)}, 2)
    with pytest.raises(SwitchError, match="endpoints of this one come with this call"):
        trainmover_ext.resume(2, {1: endpoint_of_another(incarnation=5)})
    assert trainmover_ext.generation() == 1
    trainmover_ext.resume(3, {1: endpoint_of_another(incarnation=6)})
    with pytest.raises(SwitchError, match="holds it already"):
        trainmover_ext.prepare_switch(4, {1: endpoint_of_another(incarnation=6)})


def test_notes_are_bounded_and_need_somebody_to_go_to(start_single: Callable[[], None]) -> None:
    start_single()
    with pytest.raises(ValueError, match="expected at most"):
        trainmover_ext.send_note(1, 1, bytes(trainmover_ext.NOTE_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="expected another"):
        trainmover_ext.send_note(0, 1, b"")
    with pytest.raises(trainmover_ext.TransportError, match="no endpoint is known"):
        trainmover_ext.send_note(1, 1, b"")
    assert trainmover_ext.receive_note(0) is None
    assert trainmover_ext.receive_note(0.01) is None
    assert trainmover_ext.control_stats()["connections_made"] == 0
