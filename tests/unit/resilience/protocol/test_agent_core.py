"""The agent: starts ranks once, relays, tells again what may have been missed, obeys the highest term."""

from __future__ import annotations

from megatron.resilience.protocol.agent_core import (
    AgentCore,
    Connected,
    ControllerSaid,
    Disconnected,
    EndRank,
    Hang,
    ProcessEnded,
    RankSaid,
    SayToController,
    SayToRank,
    Spawn,
)
from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.messages import (
    AgentHello,
    Built,
    Directory,
    Discard,
    FromRank,
    Go,
    LeaveJob,
    Progress,
    RankEnded,
    RankReport,
    Ready,
    Rejected,
    Release,
    StartRanks,
    StartRefused,
    StopJob,
    Table,
    TableHeard,
    ToAgent,
    ToRank,
    Welcome,
    WorkerHello,
)


def start(generation: int = 1, ranks: tuple[int, ...] = (2, 3), term: int = 1) -> StartRanks:
    return StartRanks(
        term=term, generation=generation, slot=1, ranks=ranks, endpoints={}, slot_generations=(1, generation)
    )


def agent() -> AgentCore:
    core = AgentCore(
        machine_id="m1",
        incarnation=4,
        job="j",
        machines=2,
        ranks_per_machine=2,
        capacity=Capacity(ranks=2, memory_bytes=1),
        facts=Facts(torch="2"),
    )
    core.step(Connected())
    return core


def obey(core: AgentCore, message: ToAgent) -> list[object]:
    return list(core.step(ControllerSaid(message=message)))


def say(core: AgentCore, report: RankReport, rank: int = 2, generation: int = 1) -> list[object]:
    return list(core.step(RankSaid(global_rank=rank, generation=generation, report=report)))


HELLO = WorkerHello(generation=1, endpoint="h:2", facts=Facts())
BUILT = Built(generation=1, endpoint="h:2", facts=Facts(), memory_bytes=1)


def test_ranks_are_started_once() -> None:
    core = agent()
    assert obey(core, start()) == [Spawn(start=start())]
    assert obey(core, start()) == []
    say(core, HELLO)
    again = obey(core, start())
    assert again == [SayToController(message=FromRank(global_rank=2, generation=1, report=HELLO))]


def test_ranks_that_have_ended_are_not_started_again_for_the_same_generation() -> None:
    core = agent()
    obey(core, start(5, (2,)))
    core.step(ProcessEnded(global_rank=2, generation=5, exit_code=-9, why="killed"))
    (ended,) = obey(core, start(5, (2,)))
    assert isinstance(ended, SayToController)
    assert isinstance(ended.message, RankEnded)


def test_what_it_cannot_start_it_refuses() -> None:
    core = agent()
    for message, why in ((start(2, (1, 2, 3)), "room for 2"), (start(3), None), (start(4), "run here")):
        (action,) = obey(core, message)
        if why:
            assert isinstance(action, SayToController)
            assert isinstance(action.message, StartRefused)
            assert why in action.message.why
    stopped = agent()
    obey(stopped, StopJob(term=1, why="over", ok=True))
    (action,) = obey(stopped, start())
    assert isinstance(action, SayToController)
    assert "the job is over here" in str(action.message)


def test_it_tells_all_that_may_have_been_missed_when_it_connects_again() -> None:
    core = agent()
    obey(core, start())
    say(core, HELLO)
    say(core, BUILT)
    core.step(Disconnected())
    assert say(core, Ready(generation=6)) == []
    assert say(core, Progress(iteration=3, median_iteration_ms=1.0)) == []
    core.step(ProcessEnded(global_rank=3, generation=1, exit_code=0))
    told = [action.message for action in core.step(Connected()) if isinstance(action, SayToController)]
    hello = told[0]
    assert isinstance(hello, AgentHello)
    assert [(held.global_rank, held.slot) for held in hello.ranks] == [(2, 1)]
    reports = [message.report for message in told if isinstance(message, FromRank)]
    assert reports == [HELLO, BUILT, Ready(generation=6)]
    assert isinstance(told[-1], RankEnded)
    assert not told[-1].expected


def test_it_relays_both_ways_and_not_to_what_is_not_there() -> None:
    core = agent()
    obey(core, start())
    down = ToRank(term=1, global_rank=2, command=Go(generation=2))
    assert obey(core, down) == [SayToRank(global_rank=2, command=Go(generation=2))]
    assert obey(core, ToRank(term=1, global_rank=9, command=Go(generation=2))) == []
    up = say(core, Ready(generation=2))
    assert up == [SayToController(message=FromRank(global_rank=2, generation=1, report=Ready(generation=2)))]
    assert say(core, Ready(generation=2), generation=7) == []
    directory = Directory(endpoints={}, slot_generations=(1, 1))
    assert obey(core, Table(term=1, directory=directory)) == [
        *(SayToRank(global_rank=rank, command=directory) for rank in (2, 3)),
        SayToController(message=TableHeard(slot_generations=(1, 1))),
    ]


def test_lower_terms_are_not_obeyed() -> None:
    core = agent()
    obey(core, Welcome(term=5, job="j"))
    (action,) = obey(core, StopJob(term=4, why="old", ok=True))
    assert isinstance(action, Hang)
    assert not action.for_good
    assert not core.stopped
    hello = core.step(Connected())[0]
    assert isinstance(hello, SayToController)
    assert isinstance(hello.message, AgentHello)
    assert hello.message.term_seen == 5


def test_a_release_is_gentle_and_no_failure() -> None:
    core = agent()
    obey(core, start(1, (2,)))
    assert obey(core, Release(term=1, generation=1)) == []
    leave, end = obey(core, Release(term=1, generation=2))
    assert leave == SayToRank(global_rank=2, command=LeaveJob(generation=2))
    assert isinstance(end, EndRank)
    assert end.gently
    assert obey(core, Release(term=1, generation=2)) == []
    (told,) = core.step(ProcessEnded(global_rank=2, generation=1, exit_code=0))
    assert isinstance(told, SayToController)
    assert isinstance(told.message, RankEnded)
    assert told.message.expected


def test_joiners_are_discarded_and_nothing_else_is() -> None:
    core = agent()
    obey(core, start(3, (2,)))
    assert obey(core, Discard(term=1, generation=2, why="x")) == []
    assert obey(core, Discard(term=1, generation=4, why="x")) == []
    (end,) = obey(core, Discard(term=1, generation=3, why="x"))
    assert end == EndRank(global_rank=2, generation=3, gently=False, why="x")
    holder = agent()
    obey(holder, start(1, (2,)))
    assert obey(holder, Discard(term=1, generation=1, why="x")) == []


def test_a_stop_ends_all_and_a_rejection_hangs_up_for_good() -> None:
    core = agent()
    obey(core, start())
    assert [type(action) for action in obey(core, StopJob(term=1, why="over", ok=True))] == [EndRank, EndRank]
    (action,) = obey(core, Rejected(term=1, why="not now", final=False))
    assert isinstance(action, Hang)
    assert not action.for_good
    (action,) = obey(core, Rejected(term=1, why="no", final=True))
    assert action == Hang(why="no", for_good=True)
