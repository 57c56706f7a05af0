"""State goes over in threads of its own; what happens there comes back as events. Real sockets."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.resilience.protocol.switch import (
    LinkBroke,
    TransferAcked,
    TransferFailed,
    TransferWhole,
    VerdictCame,
)
from megatron.resilience.worker.transfers import Events, JoinerTransfer, LeaverTransfer
from tests.unit.resilience.state.handover import IDENTITY, Memory

GENERATION = IDENTITY.generation
LIMIT_S = 20.0


class Pair:
    """A leaver rank and its joiner rank."""

    def __init__(self) -> None:
        self.given, self.taken = Memory(filled=True), Memory(filled=False)
        self.leaver_events: Events = queue.SimpleQueue()
        self.joiner_events: Events = queue.SimpleQueue()
        self.leaver = LeaverTransfer(IDENTITY, self.given, self.leaver_events, transfer_s=60)
        address = self.leaver.listen("127.0.0.1")
        self.joiner = JoinerTransfer(IDENTITY, address, self.taken, self.joiner_events)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    with contextlib.closing(made.joiner), contextlib.closing(made.leaver):
        yield made


def next_of(events: Events) -> Any:
    return events.get(timeout=LIMIT_S)


def test_state_goes_over_and_both_sides_hear_of_it_in_order(pair: Pair) -> None:
    pair.leaver.send()
    assert next_of(pair.leaver_events) == TransferAcked(generation=GENERATION)
    assert next_of(pair.joiner_events) == TransferWhole(generation=GENERATION)
    assert pair.taken == pair.given
    assert pair.leaver.bytes_moved == pair.joiner.bytes_moved > 765
    assert pair.leaver.tell(leave=True)
    assert next_of(pair.joiner_events) == VerdictCame(generation=GENERATION, leave=True)
    assert pair.leaver_events.empty()


def test_staying_reaches_a_joiner_that_has_the_state_and_one_that_waits_for_it(pair: Pair) -> None:
    waiting = Pair()
    with contextlib.closing(waiting.joiner), contextlib.closing(waiting.leaver):
        assert waiting.leaver.tell(leave=False)
        assert next_of(waiting.joiner_events) == VerdictCame(generation=GENERATION, leave=False)
        assert waiting.taken != waiting.given
    pair.leaver.send()
    assert next_of(pair.leaver_events) == TransferAcked(generation=GENERATION)
    assert next_of(pair.joiner_events) == TransferWhole(generation=GENERATION)
    assert pair.leaver.tell(leave=False)
    assert next_of(pair.joiner_events) == VerdictCame(generation=GENERATION, leave=False)


def test_what_breaks_becomes_an_event_with_its_reason(pair: Pair) -> None:
    pair.taken.fits = False
    pair.leaver.send()
    broke = next_of(pair.joiner_events)
    assert isinstance(broke, LinkBroke)
    assert "does not fit" in broke.why
    failed = next_of(pair.leaver_events)
    assert isinstance(failed, TransferFailed)
    assert failed.generation == GENERATION
    assert failed.why


def test_closing_ends_a_wait_soon_and_silently() -> None:
    pair = Pair()
    started_s = time.monotonic()
    pair.joiner.close()
    pair.leaver.send()  # to nobody
    pair.leaver.close()
    assert time.monotonic() - started_s < 5.0
    assert pair.leaver_events.empty()
    assert pair.joiner_events.empty()


def test_leaving_before_the_state_is_whole_is_not_told(pair: Pair) -> None:
    assert not pair.leaver.tell(leave=True)


def test_a_joiner_of_another_layout_is_refused_before_the_boundary() -> None:
    events: Events = queue.SimpleQueue()
    leaver = LeaverTransfer(IDENTITY, Memory(filled=True), queue.SimpleQueue(), transfer_s=60)
    joiner = JoinerTransfer(IDENTITY, leaver.listen("127.0.0.1"), Memory((700, 2, 63), filled=False), events)
    with contextlib.closing(joiner), contextlib.closing(leaver):
        given_up_s = time.monotonic() + LIMIT_S
        while events.empty():
            assert time.monotonic() < given_up_s, "it is not refused"
            leaver.tend()
        broke = events.get()
    assert isinstance(broke, LinkBroke)
    assert "lays its state out in another way" in broke.why
