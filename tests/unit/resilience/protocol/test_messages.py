"""All messages: written and read again, refused from the wrong side, as the document lists them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from megatron.resilience.protocol import messages
from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.messages import (
    MESSAGE_BYTES_MAX,
    ROUTES,
    AgentHello,
    FromRank,
    Go,
    HeldRank,
    Message,
    MessageError,
    NoteAcked,
    Party,
    PrepareStayer,
    Ready,
    ToRank,
    Welcome,
    decode,
    encode,
    route_types,
)

DOCUMENT = Path(__file__).parents[4] / "docs" / "protocol.md"


def test_messages_come_through_unchanged() -> None:
    hello = AgentHello(
        machine_id="m1",
        incarnation=3,
        job="j",
        machines=2,
        ranks_per_machine=2,
        rack="r",
        capacity=Capacity(ranks=2, memory_bytes=10),
        facts=Facts(torch="2.13.0"),
        ranks=(HeldRank(global_rank=1, slot=0, generation=1),),
    )
    assert decode(encode(hello), sender=Party.AGENT, receiver=Party.CONTROLLER) == hello
    down = ToRank(term=1, global_rank=4, command=PrepareStayer(generation=2, joiners={3: "h:1"}, linked=(3,)))
    assert decode(encode(down), sender=Party.CONTROLLER, receiver=Party.AGENT) == down
    up = FromRank(global_rank=4, generation=1, report=Ready(generation=2, linked=(1, 2)))
    assert decode(encode(up), sender=Party.AGENT, receiver=Party.CONTROLLER) == up


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route[0].value} to {route[1].value}")
def test_every_side_refuses_what_another_may_say(route: tuple[Party, Party]) -> None:
    mine = {one.__name__ for one in route_types(route)}
    for other, union in ROUTES.items():
        for one in route_types(other):
            assert union is not None
            if one.__name__ in mine:
                continue
            stranger = msgspec.msgpack.encode({"message": one.__name__})
            with pytest.raises(MessageError, match="same version of trainmover"):
                decode(stranger, sender=route[0], receiver=route[1])


@pytest.mark.parametrize(
    "content",
    [
        {"message": "Go"},
        {"message": "Go", "generation": "2"},
        {"message": "Go", "generation": 2, "more": 1},
        {"message": "Nonsense", "generation": 2},
        {"generation": 2},
        [1],
    ],
)
def test_wrong_fields_are_refused(content: object) -> None:
    with pytest.raises(MessageError, match="that the rank cannot read"):
        decode(msgspec.msgpack.encode(content), sender=Party.AGENT, receiver=Party.RANK)


def test_broken_and_endless_bytes_are_refused() -> None:
    whole = encode(NoteAcked(generation=3))
    for length in range(len(whole)):
        with pytest.raises(MessageError):
            decode(whole[:length], sender=Party.RANK, receiver=Party.PEER)
    with pytest.raises(MessageError, match="expected at most"):
        decode(bytes(MESSAGE_BYTES_MAX + 1), sender=Party.RANK, receiver=Party.PEER)


def test_all_messages_are_in_the_table_and_exported() -> None:
    known = {one for route in ROUTES for one in route_types(route)}
    names = {one.__name__ for one in known}
    assert len(names) == len(known)
    exported = [getattr(messages, name) for name in messages.__all__]
    classes = {one for one in exported if isinstance(one, type) and issubclass(one, Message) and one is not Message}
    assert {one.__name__ for one in classes} == names


def test_messages_of_the_controller_bear_its_term() -> None:
    for one in route_types((Party.CONTROLLER, Party.AGENT)):
        assert "term" in one.__struct_fields__, one
    assert Welcome(term=2, job="j").term == 2
    assert Go(generation=1) != Go(generation=2)


def test_the_document_lists_all_messages() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    assert listed == {one.__name__ for route in ROUTES for one in route_types(route)}
