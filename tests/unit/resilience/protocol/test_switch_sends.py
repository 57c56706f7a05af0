"""What a machine is told again when it attaches: nothing is lost for good, and nothing is told to others."""

from __future__ import annotations

from megatron.resilience.protocol.controller_words import Send
from megatron.resilience.protocol.messages import (
    Abort,
    Directory,
    Go,
    Left,
    PrepareJoiner,
    PrepareLeaver,
    PrepareStayer,
    Query,
    Ready,
    Release,
    Running,
    StartRanks,
    StartRefused,
    Table,
    TableHeard,
    Withdraw,
)
from megatron.resilience.protocol.switch_sends import Phase
from tests.unit.resilience.protocol.controller_talk import Talk, going, running


def preparing() -> Talk:
    talk = running()
    talk.migrate("m1")
    talk.build(2, 1, 2)
    talk.report(1, 1, Ready(generation=2, linked=(0,), transfer="h1:t"))
    return talk


def test_each_is_told_its_own_part_again() -> None:
    talk = preparing()
    talk.hello(0, (0, 1))
    assert talk.said(PrepareStayer)
    assert not talk.said(PrepareLeaver)
    talk.hello(1, (1, 1))
    assert talk.said(PrepareLeaver)
    assert not talk.said(PrepareStayer)
    talk.hello(2, (1, 2))
    assert talk.said(StartRanks)[0][1].generation == 2
    assert talk.said(PrepareJoiner)
    talk.hello(3)
    assert {action.machine_id for action in talk.last if isinstance(action, Send)} == {"m3"}
    assert not talk.said(PrepareJoiner)


def test_the_lead_is_told_go_and_withdraw_again() -> None:
    talk = going()
    talk.hello(1, (1, 1))
    assert talk.said(Go)
    talk.end(2, 1, 2)
    talk.hello(1, (1, 1))
    assert talk.said(Withdraw)
    assert not talk.said(Go)


def test_after_a_restart_go_is_told_only_when_the_lead_has_not_heard_it() -> None:
    talk = going()
    talk.restart()
    talk.hello(1, (1, 1))
    assert talk.said(Query)
    assert not talk.said(Go)
    talk.report(1, 1, Ready(generation=2, linked=(0,), transfer="h1:t"))
    assert talk.said(Go)


def test_a_restart_falls_back_to_what_is_written_down() -> None:
    talk = preparing()
    talk.restart()
    drive = talk.core.commands.drive
    assert drive is not None
    assert drive.phase is Phase.JOINING
    talk.hello(2, (1, 2))
    ((joiner, start),) = talk.said(StartRanks)
    assert (joiner, start.endpoints) == ("m2", {0: "h0:0", 1: "h1:1"})
    talk = going()
    talk.end(2, 1, 2)
    talk.restart()
    drive = talk.core.commands.drive
    assert drive is not None
    assert drive.phase is Phase.WITHDRAWING


def test_an_abort_after_a_restart_reaches_all_as_it_does_not_know_who_prepared() -> None:
    talk = going()
    talk.end(2, 1, 2)
    talk.restart()
    talk.hello(0, (0, 1))
    talk.hello(1, (1, 1))
    from megatron.resilience.protocol.messages import Withdrawn

    talk.report(1, 1, Withdrawn(generation=2))
    assert {name for name, _ in talk.said(Abort)} == {"m0", "m1"}


def test_a_restarted_controller_tells_the_table_to_whoever_attaches_first() -> None:
    talk = going()
    talk.report(1, 1, Left(generation=2, boundary=9))
    talk.restart()
    talk.hello(0, (0, 1))
    assert talk.said(Table)[0][1].directory == Directory(endpoints={0: "h0:0", 1: "h2:1"}, slot_generations=(1, 2))


def test_a_machine_that_attaches_again_is_told_the_table_alone() -> None:
    talk = running()
    talk.hello(1, (1, 1))
    assert [name for name, _ in talk.said(Table)] == ["m1"]
    talk.listen(1, 1, 1)
    assert talk.said(Table) == [], "it listens where it did"


def test_leavers_are_kept_until_every_holder_has_the_table() -> None:
    talk = going()
    talk.heard(0, 2)  # of the table before the switch
    talk.lose(0)
    talk.report(1, 1, Left(generation=2, boundary=9))
    assert [name for name, _ in talk.said(Table)] == ["m2"]
    talk.report(2, 1, Running(generation=2, iteration=9), started=2)
    talk.heard(2)
    talk.wait(1e9)
    assert not talk.core.desk.ledger.ended, "an agent that is away costs no job"
    talk.says(2, TableHeard(slot_generations=(1, 1)))  # of an older table
    talk.hello(0, (0, 1))
    assert talk.said(Table)
    talk.says(0, TableHeard(slot_generations=(1, 1)))
    assert not talk.said(Release)
    talk.heard(0)
    assert [name for name, _ in talk.said(Release)] == ["m1"]


def test_the_leavers_address_is_never_told_for_its_slot_again() -> None:
    talk = going()
    talk.report(1, 1, Left(generation=2, boundary=9))
    talk.hello(1, (1, 1))  # it attaches again, before the joiner runs
    talk.build(1, 1, 1)
    assert talk.core.desk.endpoints == {0: "h0:0", 1: "h2:1"}
    talk = going()
    talk.restart()
    talk.hello(0, (0, 1))
    talk.build(0, 0, 1)
    talk.hello(1, (1, 1))
    talk.build(1, 1, 1)
    talk.report(1, 1, Left(generation=2, boundary=9))  # and its joiner was not heard of yet
    talk.hello(2, (1, 2))
    talk.build(2, 1, 2)
    assert talk.core.desk.endpoints == {0: "h0:0", 1: "h2:1"}


def test_a_machine_is_busy_from_the_word_to_start_ranks_until_they_have_ended() -> None:
    talk = running()
    talk.migrate("m1", to=("m2",))
    assert talk.said(StartRanks)
    machine = talk.core.desk.members.get("m2")
    assert machine is not None
    assert machine.ranks == {1: 2}
    talk.says(2, StartRefused(generation=2, why="a test"))
    assert machine.ranks == {}
    assert "it was refused before for this command" in talk.core.desk.ledger.answers["c1"].text
    talk.migrate("m1", to=("m2",), command_id="c2")
    assert machine.ranks == {1: 3}
    talk.end(2, 1, 3)
    assert machine.ranks == {1: 4}
    talk.says(2, StartRefused(generation=3, why="late"))
    assert machine.ranks == {1: 4}
