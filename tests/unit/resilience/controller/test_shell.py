"""The controller's shell: written down before told, nothing after a failure, outboxes that do not grow for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from megatron.resilience.controller.event_log import EventLog
from megatron.resilience.controller.shell import OUTBOX_MESSAGES_MAX, Clock, Controller, Linger, Outbox
from megatron.resilience.controller.store import StoreError
from megatron.resilience.protocol.controller_words import JobSpec
from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.journal import JobStarted, decode_entry, encode_entry
from megatron.resilience.protocol.messages import (
    AgentHello,
    AskStatus,
    Message,
    StartRanks,
    StatusAnswer,
    StopJob,
    Welcome,
)

READINGS_MAX = 100_000
"""Of a clock, until it must have moved."""


class MemoryStore:
    """A store that remembers, in one order with what is sent, or fails."""

    term = 7

    def __init__(self, said: list[object], entries: Sequence[bytes] = (), *, fails: bool = False) -> None:
        self.said, self.entries, self.fails = said, list(entries), fails

    def read(self) -> Sequence[bytes]:
        return self.entries

    def append(self, entry: bytes) -> None:
        if self.fails:
            raise StoreError("the disk is full")
        self.said.append(decode_entry(entry))

    def close(self) -> None: ...


class Recorder(Outbox):
    """An outbox that also writes into the common order."""

    def __init__(self, said: list[object]) -> None:
        super().__init__()
        self.said = said

    def put(self, message: Message) -> None:
        self.said.append(message)


def controller(tmp_path: Path, store: MemoryStore, linger: Linger | None = None) -> tuple[Controller, list[str]]:
    log = EventLog(tmp_path / "events.jsonl")
    log.open()
    stops: list[str] = []
    spec = JobSpec(job="a", slots=1, ranks_per_machine=2)
    return Controller(spec, store, log, on_failure=lambda: stops.append("stop"), linger=linger), stops


HELLO = AgentHello(
    machine_id="machine-0",
    incarnation=1,
    job="a",
    machines=1,
    ranks_per_machine=2,
    capacity=Capacity(ranks=2, memory_bytes=1),
    facts=Facts(),
)


def test_decision_is_written_down_before_it_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        said: list[object] = []
        one, _ = controller(tmp_path, MemoryStore(said))
        connection, _ = one.agent_came()
        one._agents[connection] = Recorder(said)
        one.agent_said(connection, HELLO)
        assert [type(word) for word in said] == [Welcome, JobStarted, StartRanks]
        assert isinstance(said[0], Welcome)
        assert said[0].term == 7

    asyncio.run(run())


def test_nothing_is_told_once_something_could_not_be_written_down(tmp_path: Path) -> None:
    async def run() -> None:
        said: list[object] = []
        one, stops = controller(tmp_path, MemoryStore(said, fails=True))
        connection, _ = one.agent_came()
        one._agents[connection] = Recorder(said)
        with pytest.raises(StoreError):
            one.agent_said(connection, HELLO)
        assert stops == ["stop"]
        assert isinstance(one.failure, StoreError)
        one.tick()
        one.agent_said(connection, HELLO)
        assert [type(word) for word in said] == [Welcome]

    asyncio.run(run())


def test_users_get_their_own_answers(tmp_path: Path) -> None:
    async def run() -> None:
        one, _ = controller(tmp_path, MemoryStore([]))
        (_, first), (gone, second) = one.user_asked(AskStatus()), one.user_asked(AskStatus())
        one.user_gone(gone)
        assert isinstance(await asyncio.wait_for(first.get(), 5), StatusAnswer)
        assert isinstance(await asyncio.wait_for(second.get(), 5), StatusAnswer)

    asyncio.run(run())


def test_controller_stays_until_every_machine_has_heard_of_the_end_within_a_limit(tmp_path: Path) -> None:
    async def run() -> None:
        patient = Linger(quiet_s=0.0, away_s=1e9)
        one, _ = controller(tmp_path, MemoryStore([]), patient)
        other = msgspec.structs.replace(HELLO, machine_id="machine-9", elastic=True)
        first, _ = one.agent_came()
        second, _ = one.agent_came()
        one.agent_said(second, other)
        one.agent_said(first, HELLO)
        one.agent_gone(second)
        one.tick()
        assert not one.may_end
        one.core.fail_job("over")
        one.tick()
        assert not one.may_end, "an agent is connected"
        one.agent_gone(first)
        one.tick()
        assert not one.may_end, "the other has not heard of it"
        third, outbox = one.agent_came()
        one.agent_said(third, other)
        assert isinstance(await asyncio.wait_for(outbox.get(), 5), Welcome)
        assert isinstance(await asyncio.wait_for(outbox.get(), 5), StopJob)
        one.agent_gone(third)
        one.tick()
        assert one.may_end

    asyncio.run(run())


def test_controller_does_not_wait_for_ever_for_machines_that_are_away(tmp_path: Path) -> None:
    async def run() -> None:
        one, _ = controller(tmp_path, MemoryStore([]), Linger(quiet_s=1e9, away_s=0.0))
        connection, _ = one.agent_came()
        one.agent_said(connection, HELLO)
        one.agent_gone(connection)
        one.core.fail_job("over")
        assert one.core.untold() == ["machine-0"]
        one.tick()
        assert one.may_end

    asyncio.run(run())


def test_full_outbox_is_cut_off_and_a_closed_one_is_emptied_first() -> None:
    async def run() -> None:
        full = Outbox()
        for _ in range(OUTBOX_MESSAGES_MAX + 1):
            full.put(AskStatus())
        assert full.is_cut
        assert await asyncio.wait_for(full.get(), 5) is None
        closed = Outbox()
        closed.put(AskStatus())
        closed.close()
        closed.put(AskStatus())
        assert isinstance(await asyncio.wait_for(closed.get(), 5), AskStatus)
        assert await asyncio.wait_for(closed.get(), 5) is None
        assert await asyncio.wait_for(closed.get(), 5) is None

    asyncio.run(run())


def test_clock_starts_at_the_wall_and_never_goes_back() -> None:
    clock = Clock()
    read = [clock() for _ in range(1000)]
    assert read == sorted(read)
    assert read[0] > 1.6e12


def test_time_passes_also_after_the_wall_clock_was_set_back(tmp_path: Path) -> None:
    """Everything is measured from the newest entry on, which may bear a time that the wall has yet to reach."""
    newest_ms = 5e12
    clock = Clock(at_least_ms=newest_ms, wall=lambda: 1e12)
    first = clock()
    assert newest_ms <= first < newest_ms + 1e6
    assert any(clock() > first for _ in range(READINGS_MAX))
    assert Clock(at_least_ms=newest_ms, wall=lambda: 6e12)() >= 6e12
    entry = encode_entry(JobStarted(time_ms=newest_ms, machines=("machine-0",), incarnations=(1,)))
    log = EventLog(tmp_path / "events.jsonl")
    log.open()
    spec = JobSpec(job="a", slots=1, ranks_per_machine=2)
    one = Controller(spec, MemoryStore([], [entry]), log, on_failure=lambda: None, wall=lambda: 1e12)

    def ticks() -> float:
        one.tick()
        return one.core.desk.now_ms

    assert any(ticks() > newest_ms for _ in range(READINGS_MAX))
