"""What a rank answers while links are prepared beside its live ones; whole switches are in tests/distributed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import trainmover_ext
from megatron.resilience.protocol.leaver import Leaver, LeaverState
from megatron.resilience.protocol.messages import (
    Directory,
    Left,
    NoteAcked,
    PrepareLeaver,
    PrepareStayer,
    RankCommand,
    RankReport,
    Ready,
    Unready,
)
from megatron.resilience.protocol.switch import NoteCame
from megatron.resilience.protocol.vote import Contribution
from megatron.resilience.state.errors import TransferCancelled
from megatron.resilience.state.state_client import StateClient
from megatron.resilience.state.transfer import TransferIdentity
from megatron.resilience.worker.errors import SlotMoved
from megatron.resilience.worker.handover import Handover
from megatron.resilience.worker.limits import SwitchLimits
from megatron.resilience.worker.rank_worker import Place, RankWorker
from megatron.resilience.worker.transfers import LeaverTransfer
from tests.unit.resilience.state.handover import Elsewhere, Memory
from trainmover_ext.switching import SwitchPhase, SwitchState

LIMIT_S = 20.0


@dataclass
class Line:
    """The agent's end of the rank's line."""

    commands: list[RankCommand] = field(default_factory=list)
    reports: list[RankReport] = field(default_factory=list)

    def send(self, report: RankReport) -> None:
        self.reports.append(report)

    def take(self) -> list[RankCommand]:
        taken, self.commands = self.commands, []
        return taken


@dataclass
class Links:
    """The data plane of a rank whose links to the joiner come up, and break, when the test says so."""

    state: SwitchState = field(default_factory=lambda: SwitchState(phase=SwitchPhase.PENDING, reason=""))
    prepared: list[tuple[int, dict[int, str]]] = field(default_factory=list)
    refuses: str = ""
    peers: tuple[int, ...] = (3,)

    def prepare(self, generation: int, joiners: dict[int, str]) -> None:
        if self.refuses:
            raise trainmover_ext.SwitchError(self.refuses)
        assert generation not in [known for known, _ in self.prepared], "the data plane refuses a generation twice"
        self.prepared.append((generation, joiners))


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Links:
    made = Links()
    plane: dict[str, Any] = {
        "memory_stats": lambda: {"link_buffers": 1},
        "linked_ranks": lambda: made.peers,
        "abort_switch": lambda generation: None,
        "prepare_switch": made.prepare,
        "switch_state": lambda generation: made.state,
    }
    for name, function in plane.items():
        monkeypatch.setattr(trainmover_ext, name, function)
    return made


class Arenas:
    total_bytes = 10

    def layout_digest(self) -> bytes:
        return Memory(filled=True).layout_digest()


@pytest.fixture
def line() -> Line:
    return Line()


def worker_of(
    line: Line, all_reduce: Callable[[Contribution], Contribution], limits: SwitchLimits | None = None
) -> RankWorker:
    place = Place(global_rank=1, job="job", token="token", bind_address="127.0.0.1")
    return RankWorker(place, line, inventory=Arenas(), handover=Handover(), all_reduce=all_reduce, limits=limits)


@pytest.fixture
def vote(links: Links, line: Line) -> Iterator[Callable[[], int]]:
    """One vote after the other; gives the rank's veto."""
    worker = worker_of(line, lambda own: own)
    iterations = itertools.count(1)

    def one() -> int:
        return worker.vote(next(iterations), obstacles=(), exits=0).veto

    assert one() == 0
    yield one
    worker.close()


PREPARE = PrepareStayer(generation=2, joiners={3: "joiner of 3"}, linked=(3,))
MOVED = Directory(endpoints={1: "here", 0: "where it is now"}, slot_generations=(2, 1))
READY = SwitchState(phase=SwitchPhase.READY, reason="")


def test_each_vote_of_a_leaver_looks_at_who_came_for_its_state(links: Links, line: Line) -> None:
    links.peers = ()
    worker = worker_of(line, lambda own: own)
    line.commands = [PrepareLeaver(generation=2, leavers=(1,), lead=1)]
    worker.vote(1, obstacles=(), exits=0)
    worker.vote(2, obstacles=(), exits=0)
    ready = line.reports[-1]
    assert isinstance(ready, Ready)
    identity = TransferIdentity(job_id="job", token="token", generation=2, global_rank=1)
    client, gives_up = StateClient(identity, ready.transfer), threading.Event()
    joiner = Elsewhere(lambda: client.receive_state(Memory(filled=False), cancelled=gives_up.is_set))
    given_up_s = time.monotonic() + LIMIT_S
    for iteration in itertools.count(3):
        worker.vote(iteration, obstacles=(), exits=0)
        assert isinstance(worker._transfer, LeaverTransfer)
        if worker._transfer._server._early is not None:
            break
        assert time.monotonic() < given_up_s, "it was never looked at"
    gives_up.set()
    with pytest.raises(TransferCancelled):
        joiner.result()
    client.close()
    worker.close()


def test_a_leaver_that_nobody_releases_ends_in_the_end(
    links: Links, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(trainmover_ext, "leave_switch", left.append)
    monkeypatch.setattr(trainmover_ext, "aborted", lambda: False)
    monkeypatch.setattr(trainmover_ext, "receive_note", lambda timeout_s: None)
    links.peers = ()
    worker = worker_of(line, lambda own: own, SwitchLimits(release_s=0.1))
    line.commands = [PrepareLeaver(generation=2, leavers=(1,), lead=1)]
    worker.vote(1, obstacles=(), exits=0)
    half = worker._core.half
    assert isinstance(half, Leaver)
    worker._core.half = replace(half, state=LeaverState.ACKED, acked=half.leavers, boundary=2)
    worker._feed(NoteCame(sender=1, note=NoteAcked(generation=2)))
    assert left == [2]
    assert line.reports[-1] == Left(generation=2, boundary=2)
    with pytest.raises(SlotMoved, match=r"moved in generation 2, and no RELEASE came within 0\.1 s"):
        worker.reach_boundary(2)
    assert worker._transfer is None


def test_a_prepared_link_that_breaks_withdraws_readiness(links: Links, line: Line, vote: Callable[[], int]) -> None:
    line.commands = [PREPARE]
    assert vote() == 1
    assert links.prepared == [(2, {3: "joiner of 3"})]
    assert line.reports == []
    links.state = READY
    assert vote() == 0
    assert line.reports == [Ready(generation=2, linked=(3,))]
    assert vote() == 0
    links.state = SwitchState(phase=SwitchPhase.BROKEN, reason="the joiner is gone")
    assert vote() == 1
    assert line.reports[1:] == [Unready(generation=2, why="the joiner is gone")]


def test_asked_again_it_answers_again_and_prepares_once(links: Links, line: Line, vote: Callable[[], int]) -> None:
    line.commands = [PREPARE]
    links.state = READY
    assert vote() == 0
    links.peers = (3, 4)
    line.commands = [PREPARE]
    assert vote() == 0
    assert line.reports == [Ready(generation=2, linked=(3,))] * 2
    assert links.prepared == [(2, {3: "joiner of 3"})]


def test_what_cannot_be_prepared_is_told_and_vetoes(links: Links, line: Line, vote: Callable[[], int]) -> None:
    links.refuses = "a group would not span machines any more; choose another machine"
    line.commands = [PREPARE]
    assert vote() == 1
    assert vote() == 1
    assert line.reports == [Unready(generation=2, why=links.refuses)]


def test_a_rank_that_waits_in_a_collective_hears_that_another_has_moved(
    links: Links, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert links.peers == (3,)
    known: dict[int, str] = {}
    monkeypatch.setattr(trainmover_ext, "add_endpoints", lambda endpoints, generation: known.update(endpoints))

    def all_reduce(own: Contribution) -> Contribution:
        heard = threading.Thread(target=lambda: took.append(worker.hear(MOVED)))
        heard.start()
        heard.join(LIMIT_S)
        return own

    took: list[bool] = []
    worker = worker_of(line, all_reduce)
    worker.vote(1, obstacles=(), exits=0)
    assert (took, known) == ([True], {0: "where it is now"})
    assert not worker.hear(PREPARE)
    worker.close()


def test_what_fails_at_once_is_said_again_in_the_loop(
    links: Links, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert links.peers == (3,)

    def refuse(endpoints: object, generation: int) -> None:
        raise ValueError(f"{endpoints} of {generation}")

    monkeypatch.setattr(trainmover_ext, "add_endpoints", refuse)
    worker = worker_of(line, lambda own: own)
    assert not worker.hear(MOVED)
    line.commands = [MOVED]
    with pytest.raises(ValueError, match="where it is now"):
        worker.vote(1, obstacles=(), exits=0)
    worker.close()
