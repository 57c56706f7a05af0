"""Each rule of the switch is there for a reason: with it weakened, the simulator finds a violation.

The weakened variants live here alone. Each names the rule it breaks.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from megatron.resilience.protocol import controller_commands, leaver, rank_core, stayer
from megatron.resilience.protocol.journal import Ledger
from megatron.resilience.protocol.messages import Release
from megatron.resilience.protocol.rank_core import RankCore
from megatron.resilience.protocol.stayer import Stayer
from megatron.resilience.protocol.switch_drive import SwitchDrive
from megatron.resilience.protocol.switch_sends import Phase
from megatron.resilience.protocol.vote import Contribution, Decision
from tests.sim import process
from tests.sim.run import Violation, simulate

SEEDS = 1_500
LEVELS = (2.0, 4.0)
"""More goes wrong than in other simulations, so that less looking is needed."""


def weaken_p1_reuse_after_abort(patch: pytest.MonkeyPatch) -> None:
    """P1: a generation whose switch came to nothing is used again."""
    patch.setattr(controller_commands, "next_generation", lambda ledger: max([1, *ledger.slot_generations]) + 1)
    patch.setattr(Ledger, "expect", lambda self, holds, entry: None)


def weaken_p2_broken_links_stay_ready(patch: pytest.MonkeyPatch) -> None:
    """P2: a prepared link that breaks does not withdraw READY."""
    patch.setattr(stayer, "obstacles", lambda half: ())


def weaken_p2_leavers_ignore_new_links(patch: pytest.MonkeyPatch) -> None:
    """P2: a rank that has come to be linked to the leaver is not prepared."""
    patch.setattr(leaver, "unplanned", lambda half: [])


def weaken_p3_go_before_ready(patch: pytest.MonkeyPatch) -> None:
    """P3: GO without waiting for stayers to be READY; with their silence taken for consent."""
    patch.setattr(SwitchDrive, "_all_ready", lambda self: True)
    patch.setattr(stayer, "obstacles", lambda half: ())


def weaken_p3_abort_without_the_lead(patch: pytest.MonkeyPatch) -> None:
    """P3: after GO the controller aborts by itself, without asking the lead to give up."""

    def undo(self: SwitchDrive, why: str, *, blamed: tuple[str, ...] = (), refused: tuple[str, ...] = ()) -> None:
        if self.phase in (Phase.JOINING, Phase.LISTENING, Phase.PREPARING, Phase.GOING):
            self.conclude("undo" if self.phase is not Phase.GOING else "withdrawn", why, blamed=blamed, refused=refused)

    patch.setattr(SwitchDrive, "undo", undo)


def weaken_p4_veto_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """P4: a veto does not stop a switch."""

    def decide(result: Contribution) -> Decision:
        if result.exit:
            return Decision.EXIT
        return Decision.SWITCH if result.cast else Decision.CONTINUE

    for module in (rank_core, process):
        patch.setattr(module, "decide", decide)


def weaken_p4_votes_do_not_bind(patch: pytest.MonkeyPatch) -> None:
    """P4: what happens between a rank's vote and the result changes what it had said."""
    patch.setattr(RankCore, "_votes", property(lambda self: False, lambda self, value: None), raising=False)


def weaken_p5_one_rank_goes_later(patch: pytest.MonkeyPatch) -> None:
    """P5: stayers take the switch for one iteration later than leavers."""
    patch.setattr(stayer, "grant", lambda half, boundary, grant=stayer.grant: grant(half, boundary + 1))


def weaken_p5_stayers_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """P5: linked stayers train on at the boundary, before they know the verdict."""
    patch.setattr(Stayer, "at_boundary", property(lambda self: False))


def weaken_p6_leave_before_all_acknowledge(patch: pytest.MonkeyPatch) -> None:
    """P6: the lead decides LEAVE when its own state has arrived."""
    patch.setattr(leaver, "may_leave", lambda half: half.global_rank in half.acked)


def weaken_p6_failed_transfer_leaves(patch: pytest.MonkeyPatch) -> None:
    """P6: the lead decides LEAVE on a time-out or a failed transfer."""
    patch.setattr(leaver, "verdict_of", lambda half: True if half.failed or leaver.may_leave(half) else None)


def weaken_p7_release_at_leave(patch: pytest.MonkeyPatch) -> None:
    """P7: leavers are released as soon as the controller hears of LEAVE, not when the joiners run."""
    leave = SwitchDrive._leave

    def leave_and_release(self: SwitchDrive, boundary: int) -> None:
        leave(self, boundary)
        for move in self.moves:
            self.desk.send(move.leaver, Release(term=self.desk.term, generation=self.generation))

    patch.setattr(SwitchDrive, "_leave", leave_and_release)


def weaken_p7_release_before_all_are_told(patch: pytest.MonkeyPatch) -> None:
    """P7: leavers are released when the joiners run, whether or not all have the table."""
    patch.setattr(SwitchDrive, "_table_is_out", lambda self: True)


def weaken_p7_nobody_asks_the_lead(patch: pytest.MonkeyPatch) -> None:
    """P7: a joiner in doubt is not told what the lead decided."""
    patch.setattr(SwitchDrive, "_resolve", lambda self, rank: None)


CROSSED = "InvariantViolation: .* a message would cross generations"
UNPREPARED = "ImpossibleTransition: stayer, .* found 'grant' in state (UNREADY|PREPARING)"
ABORTED_AT_THE_BOUNDARY = "ImpossibleTransition: stayer, .* found 'abort' in state (AWAITING|FAILED)"
MOVED_AFTER_ITS_VOTE = "ImpossibleTransition: lead, .* found '(withdraw|go|broke|abort)' in state CASTING"

WEAKENED: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    weaken_p1_reuse_after_abort: "InvariantViolation: generation .* is used again",
    weaken_p2_broken_links_stay_ready: UNPREPARED,
    weaken_p2_leavers_ignore_new_links: CROSSED,
    weaken_p3_go_before_ready: f"{CROSSED}|{UNPREPARED}",
    weaken_p3_abort_without_the_lead: f"{CROSSED}|{ABORTED_AT_THE_BOUNDARY}",
    weaken_p4_veto_is_ignored: UNPREPARED,
    weaken_p4_votes_do_not_bind: f"{MOVED_AFTER_ITS_VOTE}|{UNPREPARED}",
    weaken_p5_one_rank_goes_later: "ImpossibleTransition: .* at the top of iteration .*, expected boundary",
    weaken_p5_stayers_do_not_wait: CROSSED,
    weaken_p6_leave_before_all_acknowledge: "InvariantViolation: LEAVE in .* have no whole state",
    weaken_p6_failed_transfer_leaves: "ImpossibleTransition: lead, .* found 'leave' in state SENDING",
    weaken_p7_release_at_leave: (
        "ImpossibleTransition: leaver, .* found 'release' in state ACKED|PeerLost|calls .*, which has ended"
    ),
    weaken_p7_release_before_all_are_told: "InvariantViolation: .* calls .*, which has ended",
    weaken_p7_nobody_asks_the_lead: "Violation: the job failed without need: .* no word whether .* is to go live",
}
"""As what each shows."""


def first_violation() -> str:
    for seed in range(SEEDS):
        try:
            simulate(seed, LEVELS)
        except Violation as violation:
            return str(violation).splitlines()[0]
    return ""


@pytest.mark.parametrize("weaken", WEAKENED, ids=lambda weaken: weaken.__name__.removeprefix("weaken_"))
def test_a_weakened_rule_is_found_out_as_what_it_breaks(weaken: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        weaken(patch)
        found = first_violation()
    assert found, f"{SEEDS} seeds with {weaken.__doc__} broke nothing"
    assert re.search(WEAKENED[weaken], found), found


def test_with_all_rules_whole_the_same_seeds_break_nothing() -> None:
    assert first_violation() == ""


def test_there_is_a_weakened_variant_of_each_rule() -> None:
    named = {weaken.__name__.split("_")[1] for weaken in WEAKENED}
    assert named == {f"p{number}" for number in range(1, 8)}
