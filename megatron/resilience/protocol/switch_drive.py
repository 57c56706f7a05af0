"""One switch as the controller drives it: who has answered what, and what is said next (rules P2, P3, P7).

Phase        Event       Next
JOINING      built       LISTENING    joiner ranks stand and their facts are the job's: PREPARE to the leavers
JOINING      undo        OVER
JOINING      ended       OVER
LISTENING    listening   PREPARING    their links and addresses are known: PREPARE to linked stayers and joiners
LISTENING    undo        OVER
LISTENING    ended       OVER
PREPARING    ready       GOING        all READY: GO is journalled and sent to the lead
PREPARING    undo        OVER
PREPARING    ended       OVER
GOING        undo        WITHDRAWING  the lead is asked to give up; nothing is aborted before it has
GOING        withdrawn   OVER
GOING        stayed      OVER
GOING        left        LEFT         joiners hold the slots: TABLE to all
GOING        ended       OVER         the job has come to its end first
WITHDRAWING  undo        WITHDRAWING
WITHDRAWING  withdrawn   OVER
WITHDRAWING  stayed      OVER
WITHDRAWING  left        LEFT
WITHDRAWING  ended       OVER
LEFT         running     MEASURING    and all have the table: RELEASE to the leavers
MEASURING    measured    OVER

Volatile: after a restart `SwitchDrive` is made from the ledger and everything is asked again, which all commands allow.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.resilience.protocol.facts import differences
from megatron.resilience.protocol.incidents import AWAY, HAND_OVER
from megatron.resilience.protocol.journal import (
    Move,
    SwitchAborted,
    SwitchDone,
    SwitchGo,
    SwitchLeft,
    SwitchPhase,
    SwitchWithdraw,
)
from megatron.resilience.protocol.memory import shortage
from megatron.resilience.protocol.messages import (
    Armed,
    AtBoundary,
    Built,
    Cast,
    Go,
    InDoubt,
    Left,
    Measured,
    MoreLinks,
    Planned,
    Query,
    RankReport,
    Ready,
    Release,
    Resolve,
    Running,
    Stayed,
    Unready,
    Withdraw,
    Withdrawn,
)
from megatron.resilience.protocol.placement import natural
from megatron.resilience.protocol.switch import ImpossibleTransition
from megatron.resilience.protocol.switch_sends import Phase, SwitchSends, tell_table

TRANSITIONS: dict[tuple[Phase, str], Phase] = {
    (Phase.JOINING, "built"): Phase.LISTENING,
    (Phase.JOINING, "undo"): Phase.OVER,
    (Phase.JOINING, "ended"): Phase.OVER,
    (Phase.LISTENING, "listening"): Phase.PREPARING,
    (Phase.LISTENING, "undo"): Phase.OVER,
    (Phase.LISTENING, "ended"): Phase.OVER,
    (Phase.PREPARING, "ready"): Phase.GOING,
    (Phase.PREPARING, "undo"): Phase.OVER,
    (Phase.PREPARING, "ended"): Phase.OVER,
    (Phase.GOING, "undo"): Phase.WITHDRAWING,
    (Phase.GOING, "withdrawn"): Phase.OVER,
    (Phase.GOING, "stayed"): Phase.OVER,
    (Phase.GOING, "left"): Phase.LEFT,
    (Phase.GOING, "ended"): Phase.OVER,
    (Phase.WITHDRAWING, "undo"): Phase.WITHDRAWING,
    (Phase.WITHDRAWING, "withdrawn"): Phase.OVER,
    (Phase.WITHDRAWING, "stayed"): Phase.OVER,
    (Phase.WITHDRAWING, "left"): Phase.LEFT,
    (Phase.WITHDRAWING, "ended"): Phase.OVER,
    (Phase.LEFT, "running"): Phase.MEASURING,
    (Phase.MEASURING, "measured"): Phase.OVER,
}

BEFORE_GO = (Phase.JOINING, Phase.LISTENING, Phase.PREPARING)
"""Nothing has been given to the lead: the controller may abort by itself."""
AT_LEAD = (Phase.GOING, Phase.WITHDRAWING)
"""The lead decides; the controller may only ask it to give up."""
UNDECIDED = (*BEFORE_GO, *AT_LEAD)


class SwitchDrive(SwitchSends):
    """See the module. `failure` is set when the job cannot go on."""

    # -------------------------------------------------------------- what is heard

    def hear(self, rank: int, report: RankReport, *, is_joiner: bool) -> None:
        """A rank reports. Only what bears this generation comes here."""
        match report:
            case Built() if is_joiner:
                self._hear_built(rank, report)
            case Ready() if is_joiner:
                self.joiners_ready.add(rank)
            case Ready() if rank in self.leaving:
                self._hear_leaver(rank, report)
            case Ready():
                self.stayers_ready[rank] = frozenset(report.linked)
                self._plan(rank)
            case Unready(why=why):
                self._hear_unready(rank, why, is_joiner=is_joiner)
            case MoreLinks(linked=linked):
                self._link(rank, linked)
            case Withdrawn() if rank == self.lead and self.phase in AT_LEAD:
                self.conclude("withdrawn", self._withdrawing())
            case Stayed(why=why, lacking=lacking) if self.phase in AT_LEAD:
                blamed = [self.leaving[leaver].joiner for leaver in lacking if leaver in self.leaving]
                self.conclude("stayed", f"the verdict was STAY: {self._withdrawing() or why}", blamed=blamed)
            case Left(boundary=boundary, peak_bytes=peak):
                self.leaver_peaks[rank] = peak
                self._leave(boundary)
            case Running(iteration=iteration):
                self._leave(iteration)
                self.running[rank] = iteration
            case InDoubt():
                self._resolve(rank)
            case Measured(boundary=boundary):
                self.measured[rank] = report
                self.hear_progress(boundary + 1)
            case AtBoundary() if rank == self.lead and self.phase in AT_LEAD:
                self._mark_once(HAND_OVER)
            case Armed() | Cast() | _:
                pass
        self.advance()

    def _withdrawing(self) -> str:
        """Why the lead was asked to give up, if it was."""
        return self.desk.ledger.switch.withdrawing if self.desk.ledger.switch else ""

    def _hear_built(self, rank: int, report: Built) -> None:
        ledger, move = self.desk.ledger, self.leaving[rank]
        was_whole = set(self.built) >= set(self.leaving)
        self.built[rank] = report
        if not was_whole and self.phase is Phase.GOING and set(self.built) >= set(self.leaving):
            for stayer in self._stayers():  # after a restart; links may have come up meanwhile
                self._prepare_stayer(stayer)
        differing = differences(report.facts, ledger.facts)
        if differing and self.phase in UNDECIDED:
            why = f"machine {move.joiner}, global rank {rank}: {'; '.join(differing)}; training there gives other bits"
            self.undo(why, refused=[move.joiner])
            return
        machine = self.desk.members.get(move.joiner)
        needed = sum(built.memory_bytes for other, built in self.built.items() if self.leaving[other] == move)
        if machine is not None and needed > machine.capacity.memory_bytes and self.phase in UNDECIDED:
            has = machine.capacity.memory_bytes
            self.undo(
                f"machine {move.joiner} has {has} bytes of memory, its ranks need {needed}", refused=[move.joiner]
            )
        self._check_room(move)

    def _check_room(self, move: Move) -> None:
        """What the leaver's ranks have needed against what the joiner's have found, as far as both are known."""
        ranks = [rank for rank, one in self.leaving.items() if one == move]
        known = [rank for rank in ranks if rank in self.built and rank in self.listening]
        why = shortage((self.listening[rank].peak, self.built[rank].room) for rank in known)
        if why and self.phase in BEFORE_GO:
            self.undo(f"machine {move.joiner} is too small: {why}", refused=[move.joiner])

    def _hear_leaver(self, rank: int, report: Ready) -> None:
        self.listening[rank] = report
        self._link(rank, report.linked)
        self._check_room(self.leaving[rank])
        if self.phase is Phase.PREPARING:
            self._prepare_joiner(rank)
        if self.phase is Phase.GOING and rank == self.lead:
            # After a restart: GO was journalled, and the lead has not heard it.
            self._to_leaver(rank, Go(generation=self.generation))

    def _link(self, rank: int, linked: Iterable[int]) -> None:
        new = frozenset(linked) - self.linked.get(rank, frozenset())
        self.linked[rank] = self.linked.get(rank, frozenset()) | new
        if self.phase in (Phase.PREPARING, Phase.GOING):
            for stayer in sorted(new - set(self.leaving)):
                self._prepare_stayer(stayer)

    def _plan(self, stayer: int) -> None:
        """A stayer is READY: leavers that have it among links which came later stop their veto."""
        for rank in sorted(self.stayers_ready[stayer]):
            known = self.listening.get(rank)
            if rank in self.leaving and (known is None or stayer not in known.linked):
                self._to_leaver(rank, Planned(generation=self.generation, stayers=(stayer,)))

    def _hear_unready(self, rank: int, why: str, *, is_joiner: bool) -> None:
        self.joiners_ready.discard(rank) if is_joiner else self.stayers_ready.pop(rank, None)
        if self.phase is Phase.JOINING or (self.restarted and "nothing was asked" in why):
            return
        if self.phase in UNDECIDED:
            linked = [leaver for leaver, peers in self.linked.items() if rank in peers and rank not in self.leaving]
            blamed = {self.leaving[leaver].joiner for leaver in ([rank] if is_joiner else linked)}
            self.undo(f"global rank {rank} is not ready: {why}", blamed=blamed)

    def _resolve(self, rank: int) -> None:
        """A joiner rank in doubt is told LEAVE as soon as that is known; until then the lead is asked."""
        self.doubting.add(rank)
        if self.phase in (Phase.LEFT, Phase.MEASURING):
            self.desk.to_rank(self.leaving[rank].joiner, rank, Resolve(generation=self.generation))
        elif self.phase in AT_LEAD:
            self._to_leaver(self.lead, Query(generation=self.generation))

    # -------------------------------------------------------------- what follows

    def advance(self) -> None:
        """Goes to the next phase if all that the present one waits for is there."""
        everyone = set(self.leaving)
        if self.phase is Phase.JOINING and set(self.built) >= everyone:
            self._enter("built")
            self.desk.journal(self._mark())
            for rank in sorted(everyone):
                self._prepare_leaver(rank)
        if self.phase is Phase.LISTENING and set(self.listening) >= everyone:
            self._enter("listening")
            self.desk.journal(self._mark())
            for rank in sorted(everyone):
                self._prepare_joiner(rank)
            for rank in self._stayers():
                self._prepare_stayer(rank)
        if self.phase is Phase.PREPARING and self._all_ready():
            self._enter("ready")
            joiners = {rank: built.endpoint for rank, built in sorted(self.built.items())}
            self.desk.journal(SwitchGo(time_ms=self.desk.now_ms, generation=self.generation, endpoints=joiners))
            self._to_leaver(self.lead, Go(generation=self.generation))
            self._progress("all are ready; waiting for an iteration boundary")
        if self.phase is Phase.LEFT and set(self.running) >= everyone:
            if self._table_is_out():
                self._done()
            else:
                self._mark_once("tell all machines")

    def hear_progress(self, iteration: int) -> None:
        """A rank is past the boundary, so all joiner ranks have voted: what their agents could not tell."""
        if self.phase is Phase.LEFT and iteration > self.desk.ledger.boundaries[self.generation]:
            self.running = dict.fromkeys(self.leaving, iteration)
            self.advance()

    def hear_told(self, machine_id: str, slot_generations: tuple[int, ...]) -> None:
        """A machine's ranks have the table of these generations: the one with this switch in it, or an older one."""
        if self.generation in slot_generations:
            self.told.add(machine_id)
        self.advance()

    def _table_is_out(self) -> bool:
        """All ranks know where the joiners are. Until then leavers live: a rank that calls one which has ended takes it
        for dead, and the job with it. A holder that stays away keeps them to the job's end.
        """
        return self.told >= set(self.desk.ledger.table)

    def _is_attached(self, machine_id: str) -> bool:
        machine = self.desk.members.get(machine_id)
        return machine is not None and machine.attached

    def _away_ms(self, machine_id: str) -> float:
        """How long its agent has not been connected: since this phase began, if it never was."""
        machine = self.desk.members.get(machine_id)
        began_ms = self.desk.now_ms if self.deadline_ms is None else self.deadline_ms - self._limit()
        return self.desk.now_ms - (machine.lost_since_ms if machine else began_ms)

    def _mark_once(self, phase: str) -> None:
        switch = self.desk.ledger.switch
        if switch is not None and not any(name.startswith(phase) for name, _ in switch.marks):
            self.desk.journal(SwitchPhase(time_ms=self.desk.now_ms, generation=self.generation, phase=phase))

    def _mark(self) -> SwitchPhase:
        return SwitchPhase(time_ms=self.desk.now_ms, generation=self.generation, phase=self.phase.value)

    def undo(self, why: str, *, blamed: Iterable[str] = (), refused: Iterable[str] = ()) -> None:
        """Rule P3: before GO the controller aborts; after it, the lead must give up first."""
        if self.phase in BEFORE_GO:
            self.conclude("undo", why, blamed=blamed, refused=refused)
        elif self.phase is Phase.GOING:
            self._enter("undo")
            entry = SwitchWithdraw(
                time_ms=self.desk.now_ms, generation=self.generation, why=why, blamed=tuple({*blamed, *refused})
            )
            self.desk.journal(entry)
            self._to_leaver(self.lead, Withdraw(generation=self.generation))

    def conclude(self, event: str, why: str, *, blamed: Iterable[str] = (), refused: Iterable[str] = ()) -> None:
        """It did not happen: written down, and all who prepared drop it."""
        self._enter(event)
        entry = SwitchAborted(
            time_ms=self.desk.now_ms,
            generation=self.generation,
            why=why or "withdrawn",
            blamed=tuple(sorted(set(blamed))),
            refused=tuple(sorted(set(refused))),
        )
        self.desk.journal(entry)
        self.desk.record("END", f"g{self.generation}", "aborted", entry.why)
        self._say_aborted(entry.why)
        self._progress(f"aborted: {entry.why}")

    def _leave(self, boundary: int) -> None:
        if self.phase not in AT_LEAD:
            return
        self._enter("left")
        entry = SwitchLeft(time_ms=self.desk.now_ms, generation=self.generation, boundary=boundary)
        self.desk.journal(entry)
        self.desk.endpoints |= self.desk.ledger.endpoints
        tell_table(self.desk)  # who has no link to the leaver may ask for its first one in this very iteration
        self._progress(f"switched at iteration {boundary}; waiting for the first iteration")
        for rank in sorted(self.doubting):
            self._resolve(rank)
        if self.gone:
            self.failure = f"{self.gone}, after the point of no return of generation {self.generation}"

    def _done(self) -> None:
        self._enter("running")
        self.desk.journal(SwitchDone(time_ms=self.desk.now_ms, generation=self.generation))
        for move in self.moves:
            self.desk.send(move.leaver, Release(term=self.desk.term, generation=self.generation))

    def joiner_gone(self, machine_id: str, why: str) -> None:
        """A joiner's process or machine is dead."""
        self.gone = self.gone or why
        if self.phase in UNDECIDED:
            self.undo(why, blamed=[machine_id])
        elif self.phase is Phase.LEFT:
            self.failure = f"{why}, after the point of no return of generation {self.generation}"

    def refuse(self, machine_id: str, why: str) -> None:
        """A joiner's agent will not start its ranks."""
        self.gone = self.gone or why
        self.undo(why, refused=[machine_id])

    def tick(self) -> None:
        """Deadlines of the phases, and joiners whose agents are away."""
        if self.deadline_ms is None:
            self.deadline_ms = self.desk.now_ms + self._limit()
            if self.restarted:
                self.desk.journal(SwitchPhase(time_ms=self.desk.now_ms, generation=self.generation, phase=AWAY))
        if self.phase in UNDECIDED and self.phase is not Phase.WITHDRAWING:
            for move in self.moves:
                away_ms = self._away_ms(move.joiner)
                if not self._is_attached(move.joiner) and away_ms > self.desk.limits.agent_lost_ms:
                    why = f"the agent of machine {move.joiner} is away for {away_ms:.0f} ms"
                    self.undo(why, blamed=[move.joiner])  # not dead: if the lead leaves nevertheless, it may well run
        if self.phase is not Phase.OVER and self.desk.now_ms > self.deadline_ms:
            self._expire()

    def _expire(self) -> None:
        silent = self.silent()
        late = f"'{self.phase.value}' took longer than {self._limit():.0f} ms{self._describe(silent)}"
        if self.phase in (Phase.JOINING, Phase.LISTENING, Phase.PREPARING, Phase.GOING):
            self.undo(late, blamed=silent & {move.joiner for move in self.moves})
        elif self.phase is Phase.LEFT and not set(self.running) >= set(self.leaving) and self._can_be_told():
            self.failure = f"{late}, after the point of no return of generation {self.generation}"
        elif self.phase in (Phase.LEFT, Phase.WITHDRAWING):
            self.waits = late
            self._progress(f"{late}; still waiting")
            self.deadline_ms = self.desk.now_ms + self._limit()

    def _can_be_told(self) -> bool:
        """Whether anybody could say that a rank is past the boundary."""
        return any(self._is_attached(holder) for holder in self.desk.ledger.table)

    def _describe(self, machine_ids: set[str]) -> str:
        named = [
            one if self._is_attached(one) else f"{one} (its agent is away)" for one in sorted(machine_ids, key=natural)
        ]
        return f"; not heard from: {', '.join(named)}" if named else ""

    def _limit(self) -> float:
        limits = self.desk.limits
        return {
            Phase.JOINING: limits.build_ms,
            Phase.LISTENING: limits.prepare_ms,
            Phase.PREPARING: limits.prepare_ms,
            Phase.GOING: limits.go_ms,
            Phase.WITHDRAWING: limits.prepare_ms,
            Phase.LEFT: limits.running_ms,
            Phase.MEASURING: limits.measure_ms + 3 * self.desk.progress[1],
        }.get(self.phase, float("inf"))

    def _enter(self, event: str) -> None:
        try:
            self.phase = TRANSITIONS[self.phase, event]
        except KeyError:
            raise ImpossibleTransition(f"switch {self.generation}: found '{event}' in {self.phase.name}") from None
        self.deadline_ms, self.waits = self.desk.now_ms + self._limit(), ""
        self.desk.record("INSTANT", f"g{self.generation}", self.phase.value)
