"""A rank's line to its agent, against the agent's real socket: order, bounds, refusals, forks, the agent's end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import msgspec
import pytest

from megatron.resilience.agent.rank_frames import FrameReader, Introduction, Reception, frame, socket_address
from megatron.resilience.agent.rank_socket import RankSocket
from megatron.resilience.protocol.messages import Directory, Progress, Query, RankCommand, RankReport
from megatron.resilience.worker.agent_link import QUEUED_REPORTS_MAX, AgentLink, AgentLinkError, LinkIdentity

LIMIT_S = 20.0
TOKEN = "the job's"
WHO = LinkIdentity(token=TOKEN, global_rank=3, generation=2)


class AgentSide:
    """A `RankSocket` in an event loop of its own."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int, RankReport]] = []
        self.said: list[str] = []
        self.changed = threading.Condition()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.socket = RankSocket(
            token=TOKEN, is_ours=lambda rank, generation: (rank, generation) == (3, 2), heard=self._hear, say=self._say
        )
        asyncio.run_coroutine_threadsafe(self.socket.start(), self.loop).result(LIMIT_S)

    def _hear(self, rank: int, generation: int, report: RankReport) -> None:
        with self.changed:
            self.heard.append((rank, generation, report))
            self.changed.notify_all()

    def _say(self, text: str) -> None:
        with self.changed:
            self.said.append(text)
            self.changed.notify_all()

    def do(self, call: Callable[[], object]) -> None:
        done: Future[object] = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(call()))
        done.result(LIMIT_S)

    def send(self, *commands: RankCommand) -> None:
        def send_all() -> None:
            for command in commands:
                self.socket.send(3, command)

        self.do(send_all)

    def wait(self, holds: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, LIMIT_S), (self.heard, self.said)

    def end(self) -> None:
        self.do(self.socket.stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LIMIT_S)


@pytest.fixture
def agent() -> Iterator[AgentSide]:
    side = AgentSide()
    yield side
    side.end()


@pytest.fixture
def link(agent: AgentSide) -> Iterator[AgentLink]:
    made = AgentLink(agent.socket.path, WHO)
    made.start(LIMIT_S)
    yield made
    made.close(1.0)


def progress(number: int) -> Progress:
    return Progress(iteration=number, median_iteration_ms=1.0)


def send_many(link: AgentLink, count: int) -> None:
    for number in range(count):
        link.send(progress(number))


def test_reports_arrive_in_order_and_commands_too(agent: AgentSide, link: AgentLink) -> None:
    for number in range(500):
        link.send(progress(number))
    agent.wait(lambda: len(agent.heard) == 500)
    assert agent.heard == [(3, 2, progress(number)) for number in range(500)]
    agent.send(*(Query(generation=number) for number in range(500)))
    taken: list[object] = []
    while len(taken) < 500:
        assert link.wait(LIMIT_S)
        taken += link.take()
    assert taken == [Query(generation=number) for number in range(500)]
    assert link.take() == []


def test_what_cannot_wait_is_taken_at_once_and_the_rest_waits(agent: AgentSide, link: AgentLink) -> None:
    taken: list[object] = []

    def take_directories(command: RankCommand) -> bool:
        if isinstance(command, Directory):
            taken.append(command)
        return isinstance(command, Directory)

    link.at_once = take_directories
    directory = Directory(endpoints={}, slot_generations=())
    agent.send(Query(generation=1), directory, Query(generation=2))
    while not taken:
        assert link.wait(LIMIT_S)
    assert taken == [directory]
    assert link.take() == [Query(generation=1), Query(generation=2)]
    assert not link.wait(0.0)


def test_commands_are_kept_for_a_rank_that_has_not_connected(agent: AgentSide) -> None:
    large = Directory(endpoints=dict.fromkeys(range(2000), "e" * 100), slot_generations=(1, 2))
    agent.send(large, Query(generation=2))
    link = AgentLink(agent.socket.path, WHO)
    link.start(LIMIT_S)
    taken: list[object] = []
    while len(taken) < 2:
        assert link.wait(LIMIT_S)
        taken += link.take()
    assert taken == [large, Query(generation=2)]
    link.close()


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        (LinkIdentity(token="wrong", global_rank=3, generation=2), "found another token"),
        (LinkIdentity(token=TOKEN, global_rank=4, generation=2), "expected one that this agent has started"),
        (LinkIdentity(token=TOKEN, global_rank=3, generation=1), "expected one that this agent has started"),
    ],
)
def test_who_is_not_ours_is_refused_with_the_reason(agent: AgentSide, identity: LinkIdentity, said: str) -> None:
    with pytest.raises(AgentLinkError, match=said):
        AgentLink(agent.socket.path, identity).start(LIMIT_S)
    agent.wait(lambda: any(said in text for text in agent.said))


def test_second_connection_of_a_rank_is_refused(agent: AgentSide, link: AgentLink) -> None:
    with pytest.raises(AgentLinkError, match="found a second connection of global rank 3"):
        AgentLink(agent.socket.path, WHO).start(LIMIT_S)
    link.send(progress(1))
    agent.wait(lambda: len(agent.heard) == 1)


def test_no_agent_there_is_an_error_in_time() -> None:
    with pytest.raises(AgentLinkError, match="no line to the agent at @trainmover-nobody"):
        AgentLink("@trainmover-nobody", WHO).start(1.0)


def test_peer_that_is_no_rank_is_cut_off(agent: AgentSide) -> None:
    for data in (b"\xff\xff\xff\xff", frame(b"\xc1"), frame(bytes(5000))):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(LIMIT_S)
            stranger.connect(socket_address(agent.socket.path))
            stranger.sendall(data)
            assert stranger.recv(100) == b""
    agent.wait(lambda: len(agent.said) == 3)


def test_rank_that_sends_what_it_may_not_is_cut_off(agent: AgentSide) -> None:
    with socket.socket(socket.AF_UNIX) as rank:
        rank.settimeout(LIMIT_S)
        rank.connect(socket_address(agent.socket.path))
        rank.sendall(frame(msgspec.msgpack.encode(Introduction(token=TOKEN, global_rank=3, generation=2))))
        (answer,) = FrameReader().feed(rank.recv(100))
        assert msgspec.msgpack.decode(answer, type=Reception).refusal == ""
        rank.sendall(frame(msgspec.msgpack.encode({"message": "StopJob", "term": 1, "why": ""})))
        assert rank.recv(100) == b""
    agent.wait(lambda: any("global rank 3" in text and "cannot read" in text for text in agent.said))


def test_agents_end_is_noticed_and_sending_raises(agent: AgentSide, link: AgentLink) -> None:
    agent.do(agent.socket.stop)
    assert not link.wait(LIMIT_S)
    assert not link.is_open
    with pytest.raises(AgentLinkError, match="the agent has hung up"):
        link.send(progress(1))
    link.close()


def test_full_queue_is_an_error_and_never_blocks() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(socket_address("@trainmover-test-deaf"))
        server.listen()
        link = AgentLink("@trainmover-test-deaf", WHO)
        starter = threading.Thread(target=link.start, daemon=True)
        starter.start()
        connection, _ = server.accept()
        connection.recv(4096)
        connection.sendall(frame(msgspec.msgpack.encode(Reception())))
        starter.join(LIMIT_S)
        with pytest.raises(AgentLinkError, match="expected it to read them"):
            send_many(link, 100 * QUEUED_REPORTS_MAX)  # the socket itself holds some thousands
        assert not link.flush(0.0)
        connection.close()
        link.close(1.0)


def test_forked_child_has_no_line_and_keeps_none_open(agent: AgentSide, link: AgentLink) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            try:
                link.send(progress(1))
            except AgentLinkError as error:
                os.write(writer, str(error).encode())
            threading.Event().wait(LIMIT_S)
        os._exit(0)
    os.close(writer)
    try:
        assert "this process is a fork of the rank" in os.read(reader, 4096).decode()
        link.send(progress(2))
        agent.wait(lambda: agent.heard == [(3, 2, progress(2))])
        link.close()
        # The child lives, and yet the agent sees the line's end: a new one of the same rank is welcome.
        again = AgentLink(agent.socket.path, WHO)
        _retry(lambda: again.start(LIMIT_S))
        again.close()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(reader)


def _retry(call: Callable[[], None]) -> None:
    for _ in range(100):
        try:
            call()
        except AgentLinkError:
            threading.Event().wait(0.05)
        else:
            return
    raise AssertionError("the line was never free")


def test_closing_sends_what_is_queued(agent: AgentSide) -> None:
    link = AgentLink(agent.socket.path, WHO)
    link.start(LIMIT_S)
    for number in range(200):
        link.send(progress(number))
    link.close()
    link.close()
    agent.wait(lambda: len(agent.heard) == 200)
    with pytest.raises(AgentLinkError):
        link.send(progress(1))


def test_link_imports_no_torch() -> None:
    program = "import sys, megatron.resilience.worker.agent_link; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=LIMIT_S, check=False).returncode == 0
