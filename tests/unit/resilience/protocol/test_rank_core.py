"""One rank over many switches: what belongs to which generation, what waits, what is answered again."""

from __future__ import annotations

from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.leaver import Leaver, LeaverState
from megatron.resilience.protocol.messages import (
    Abort,
    Cast,
    Directory,
    Go,
    LeaveJob,
    Left,
    MoreLinks,
    NoteVerdict,
    PrepareLeaver,
    PrepareStayer,
    Query,
    RankCommand,
    Ready,
    Running,
    Stayed,
    Unready,
    Withdraw,
    Withdrawn,
)
from megatron.resilience.protocol.rank_core import RankCore
from megatron.resilience.protocol.stayer import Stayer, StayerState
from megatron.resilience.protocol.switch import (
    AbortLinks,
    BoundaryReached,
    BuildFinished,
    CommandCame,
    CommitLinks,
    Contribute,
    EndProcess,
    LinkAppeared,
    LinkBroke,
    LinksPrepared,
    NoteCame,
    PrepareLinks,
    RankAction,
    Report,
    TransferAcked,
    TransferFailed,
    TransferListening,
    TransferWhole,
    UpdateDirectory,
    VerdictCame,
    VoteClosed,
    VoteOpened,
)
from megatron.resilience.protocol.vote import Contribution


def waits(core: RankCore) -> bool:
    return core.is_waiting


def told(core: RankCore, command: RankCommand) -> list[RankAction]:
    return core.step(CommandCame(command=command))


def prepared(generation: int = 2) -> RankCore:
    core = RankCore(1)
    told(core, PrepareStayer(generation=generation, joiners={3: "h:3"}, linked=(3,)))
    core.step(LinksPrepared(generation=generation))
    return core


def lead(generation: int = 2) -> RankCore:
    core = RankCore(3)
    core.step(LinkAppeared(peer=1))
    told(core, PrepareLeaver(generation=generation, leavers=(3,), lead=3))
    core.step(TransferListening(generation=generation, address="h:t"))
    return core


def vote(core: RankCore, iteration: int, *, cast: int = 0, veto: int = 0) -> Contribution:
    (action,) = core.step(VoteOpened(iteration=iteration))
    assert isinstance(action, Contribute)
    core.step(VoteClosed(iteration=iteration, result=Contribution(cast=cast, veto=veto)))
    return action.contribution


def test_a_rank_far_away_votes_and_does_nothing_else() -> None:
    core = RankCore(5)
    assert vote(core, 1, cast=2) == Contribution()
    assert core.step(BoundaryReached(iteration=2)) == []
    assert not waits(core)


def test_obstacles_and_exit_go_into_the_vote() -> None:
    core = RankCore(5)
    (action,) = core.step(VoteOpened(iteration=1, obstacles=("the last iteration",), exits=True))
    assert action == Contribute(contribution=Contribution(veto=1, exit=1))


def test_a_whole_switch_of_a_stayer() -> None:
    core = prepared()
    assert vote(core, 4, cast=2) == Contribution()
    core.step(BoundaryReached(iteration=5))
    assert waits(core)
    actions = core.step(NoteCame(sender=3, note=NoteVerdict(generation=2, leave=True)))
    assert actions == [CommitLinks(generation=2, joiners={3: "h:3"})]
    assert not waits(core)
    assert core.floor == 2


def test_a_vote_binds_until_its_result() -> None:
    core = prepared()
    core.step(VoteOpened(iteration=4))
    assert core.step(LinkBroke(generation=2, why="x")) == []
    assert told(core, Abort(generation=2, why="x")) == []
    core.step(VoteClosed(iteration=4, result=Contribution(cast=2)))
    assert core.half.state is StayerState.GRANTED
    core = prepared()
    core.step(VoteOpened(iteration=4))
    core.step(LinkBroke(generation=2, why="x"))
    actions = core.step(VoteClosed(iteration=4, result=Contribution(cast=2, veto=1)))
    assert actions == [Report(report=Unready(generation=2, why="x"))]
    assert vote(core, 5, cast=2, veto=1) == Contribution(veto=1)


def test_a_new_directory_does_not_wait_for_the_vote() -> None:
    core = prepared()
    core.step(VoteOpened(iteration=4))
    directory = Directory(endpoints={1: "h"}, slot_generations=(1,))
    assert told(core, directory) == [UpdateDirectory(directory=directory)]


def test_a_directory_with_the_outcome_waits_until_the_rank_has_it_too() -> None:
    """Else it would turn from the leaver, whose verdict is on its way."""
    directory = Directory(endpoints={1: "h", 3: "h:3"}, slot_generations=(1, 2))
    core = prepared()
    assert told(core, directory) == []
    vote(core, 4, cast=2)
    core.step(BoundaryReached(iteration=5))
    assert told(core, directory) == []
    actions = core.step(NoteCame(sender=3, note=NoteVerdict(generation=2, leave=True)))
    assert actions == [CommitLinks(generation=2, joiners={3: "h:3"}), UpdateDirectory(directory=directory)]
    assert core.step(BoundaryReached(iteration=6)) == []


def test_an_older_generation_never_disturbs_a_newer_one() -> None:
    core = prepared(5)
    for command in (Abort(generation=4, why="x"), Abort(generation=2, why="x")):
        assert told(core, command) == []
    assert core.switch_generation == 5
    assert told(core, Withdraw(generation=4)) == [Report(report=Withdrawn(generation=4))]
    (refused,) = told(core, PrepareStayer(generation=3, joiners={3: "h"}, linked=(3,)))
    assert isinstance(refused, Report)
    assert isinstance(refused.report, Unready)
    assert core.switch_generation == 5


def test_a_newer_generation_replaces_what_was_prepared() -> None:
    core = prepared(2)
    actions = told(core, PrepareStayer(generation=3, joiners={4: "h:4"}, linked=(4,)))
    assert actions == [AbortLinks(generation=2), PrepareLinks(generation=3, joiners={4: "h:4"})]
    assert told(core, PrepareStayer(generation=2, joiners={3: "h:3"}, linked=(3,)))[0] != actions[1]
    assert core.switch_generation == 3


def test_a_newer_generation_waits_until_the_granted_one_is_over() -> None:
    core = prepared(2)
    vote(core, 4, cast=2)
    assert told(core, PrepareStayer(generation=3, joiners={4: "h:4"}, linked=(4,))) == []
    assert told(core, PrepareStayer(generation=3, joiners={4: "h:4"}, linked=(4,))) == []
    core.step(BoundaryReached(iteration=5))
    actions = core.step(NoteCame(sender=3, note=NoteVerdict(generation=2, leave=False)))
    assert actions == [AbortLinks(generation=2), PrepareLinks(generation=3, joiners={4: "h:4"})]


def test_an_abort_of_what_is_granted_is_left_to_the_verdict() -> None:
    core = prepared(2)
    vote(core, 4, cast=2)
    assert told(core, Abort(generation=2, why="x")) == []
    core.step(BoundaryReached(iteration=5))
    assert told(core, Abort(generation=2, why="x")) == []
    assert waits(core)


def test_the_lead_casts_after_go_and_says_how_it_ended_again() -> None:
    core = lead()
    assert vote(core, 1) == Contribution()
    told(core, Go(generation=2))
    assert vote(core, 2, cast=2, veto=1) == Contribution(cast=2)
    assert vote(core, 3, cast=2) == Contribution(cast=2)
    core.step(BoundaryReached(iteration=4))
    assert waits(core)
    actions = core.step(TransferFailed(generation=2, why="reset"))
    stayed = Report(report=Stayed(generation=2, why="reset", lacking=(3,)))
    assert actions[-1] == stayed
    assert not waits(core)
    for command in (Query(generation=2), Go(generation=2), Withdraw(generation=2)):
        assert told(core, command) == [stayed]
    assert core.is_member


def test_a_withdrawal_that_comes_at_the_boundary_ends_the_wait() -> None:
    core = lead()
    told(core, Go(generation=2))
    assert vote(core, 3, cast=2) == Contribution(cast=2)
    core.step(BoundaryReached(iteration=4))
    assert told(core, Go(generation=2)) == [Report(report=Cast(generation=2, boundary=4))]
    assert waits(core)
    assert told(core, Withdraw(generation=2))[-1] == Report(
        report=Stayed(generation=2, why="the controller gave it up")
    )
    assert not waits(core)


def test_a_lead_that_has_left_says_so_when_it_is_to_withdraw() -> None:
    core = lead()
    told(core, Go(generation=2))
    assert vote(core, 3, cast=2) == Contribution(cast=2)
    core.step(BoundaryReached(iteration=4))
    core.step(TransferAcked(generation=2))
    assert told(core, Withdraw(generation=2)) == [Report(report=Left(generation=2, boundary=4))]


def test_a_lead_that_was_withdrawn_says_so_again_and_never_casts() -> None:
    core = lead()
    told(core, Go(generation=2))
    withdrawn = Report(report=Withdrawn(generation=2))
    assert told(core, Withdraw(generation=2))[-1] == withdrawn
    assert told(core, Withdraw(generation=2)) == [withdrawn]
    told(core, Go(generation=2))
    assert vote(core, 3) == Contribution()


def test_a_withdrawal_of_what_was_never_heard_of_holds() -> None:
    core = RankCore(3)
    assert told(core, Withdraw(generation=2)) == [Report(report=Withdrawn(generation=2))]
    told(core, PrepareLeaver(generation=2, leavers=(3,), lead=3))
    assert isinstance(core.half, Stayer)


def test_links_of_before_count_and_those_to_other_leavers_do_not() -> None:
    core = RankCore(3)
    for peer in (1, 4):
        core.step(LinkAppeared(peer=peer))
    told(core, PrepareLeaver(generation=2, leavers=(3, 4), lead=3))
    (action,) = core.step(TransferListening(generation=2, address="h:t"))
    assert action == Report(report=Ready(generation=2, linked=(1,), transfer="h:t"))
    (more,) = core.step(LinkAppeared(peer=7))
    assert more == Report(report=MoreLinks(generation=2, linked=(1, 7)))


def test_a_leaver_that_left_takes_no_part_and_ends_when_released() -> None:
    core = lead()
    told(core, Go(generation=2))
    vote(core, 2, cast=2)
    core.step(BoundaryReached(iteration=3))
    from megatron.resilience.protocol.switch import TransferAcked

    core.step(TransferAcked(generation=2))
    assert isinstance(core.half, Leaver)
    assert core.half.state is LeaverState.LEFT
    assert not core.is_member
    (end,) = told(core, LeaveJob(generation=2))
    assert isinstance(end, EndProcess)


def test_a_joiner_becomes_a_stayer_and_says_running_again() -> None:
    core = RankCore(3, generation=2)
    assert [core.is_member] == [False]
    core.step(BuildFinished(endpoint="h", facts=Facts(), memory_bytes=1))
    from megatron.resilience.protocol.messages import PrepareJoiner

    told(core, PrepareJoiner(generation=2, transfer="h:t", joiners={5: "h:j"}))
    core.step(TransferWhole(generation=2))
    core.step(VerdictCame(generation=2, leave=True))
    assert core.is_member
    core.step(VoteOpened(iteration=9))
    actions = core.step(VoteClosed(iteration=9, result=Contribution()))
    running = Report(report=Running(generation=2, iteration=9))
    assert actions == [running]
    assert isinstance(core.half, Stayer)
    assert told(core, Query(generation=2)) == [running]


def test_a_query_of_what_is_not_known_is_answered() -> None:
    (answer,) = told(RankCore(3), Query(generation=2))
    assert isinstance(answer, Report)
    assert isinstance(answer.report, Unready)
    core = prepared()
    assert told(core, Query(generation=2)) == [Report(report=Ready(generation=2, linked=(3,)))]
