"""What a machine is told again when it attaches: nothing is lost for good, and nothing is told to others."""

from __future__ import annotations

from megatron.resilience.protocol.controller_words import Send
from megatron.resilience.protocol.messages import (
    Abort,
    Go,
    PrepareJoiner,
    PrepareLeaver,
    PrepareStayer,
    Query,
    Ready,
    StartRanks,
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
    assert talk.said(StartRanks)
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
