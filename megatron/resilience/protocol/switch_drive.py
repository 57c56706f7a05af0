"""One switch as the controller drives it: who has answered what, and what is said next (rules P2, P3, P7).

Phase        Event       Next
JOINING      built       LISTENING    joiner ranks stand and their facts are the job's: PREPARE to the leavers
JOINING      undo        OVER
LISTENING    listening   PREPARING    their links and addresses are known: PREPARE to linked stayers and joiners
LISTENING    undo        OVER
PREPARING    ready       GOING        all READY: GO is journalled and sent to the lead
PREPARING    undo        OVER
GOING        undo        WITHDRAWING  the lead is asked to give up; nothing is aborted before it has
GOING        withdrawn   OVER
GOING        stayed      OVER
GOING        left        LEFT         joiners hold the slots
WITHDRAWING  undo        WITHDRAWING
WITHDRAWING  withdrawn   OVER
WITHDRAWING  stayed      OVER
WITHDRAWING  left        LEFT
LEFT         running     MEASURING    RELEASE to the leavers, TABLE to all
MEASURING    measured    OVER

Volatile: after a restart `SwitchDrive` is made from the ledger and everything is asked again, which all commands allow.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from megatron.resilience.protocol.controller_words import Desk
from megatron.resilience.protocol.facts import differences
from megatron.resilience.protocol.journal import (
    LedgerSwitch,
    SwitchAborted,
    SwitchDone,
    SwitchGo,
    SwitchLeft,
    SwitchPhase,
    SwitchWithdraw,
)
from megatron.resilience.protocol.membership import Machine
from megatron.resilience.protocol.messages import (
    Abort,
    Armed,
    Built,
    Cast,
    Directory,
    Discard,
    Go,
    InDoubt,
    Left,
    Measured,
    MoreLinks,
    Planned,
    PrepareJoiner,
    PrepareLeaver,
    PrepareStayer,
    ProgressLine,
    Query,
    RankReport,
    Ready,
    Release,
    Resolve,
    Running,
    StartRanks,
    Stayed,
    Table,
    Unready,
    Withdraw,
    Withdrawn,
)


class Phase(enum.Enum):
    """How far a switch has come."""

    JOINING = "start joiner"
    LISTENING = "prepare leaver"
    PREPARING = "prepare links"
    GOING = "wait for boundary"
    WITHDRAWING = "withdraw"
    LEFT = "first iteration"
    MEASURING = "measure"
    OVER = "over"


TRANSITIONS: dict[tuple[Phase, str], Phase] = {
    (Phase.JOINING, "built"): Phase.LISTENING,
    (Phase.JOINING, "undo"): Phase.OVER,
    (Phase.LISTENING, "listening"): Phase.PREPARING,
    (Phase.LISTENING, "undo"): Phase.OVER,
    (Phase.PREPARING, "ready"): Phase.GOING,
    (Phase.PREPARING, "undo"): Phase.OVER,
    (Phase.GOING, "undo"): Phase.WITHDRAWING,
    (Phase.GOING, "withdrawn"): Phase.OVER,
    (Phase.GOING, "stayed"): Phase.OVER,
    (Phase.GOING, "left"): Phase.LEFT,
    (Phase.WITHDRAWING, "undo"): Phase.WITHDRAWING,
    (Phase.WITHDRAWING, "withdrawn"): Phase.OVER,
    (Phase.WITHDRAWING, "stayed"): Phase.OVER,
    (Phase.WITHDRAWING, "left"): Phase.LEFT,
    (Phase.LEFT, "running"): Phase.MEASURING,
    (Phase.MEASURING, "measured"): Phase.OVER,
}

BEFORE_GO = (Phase.JOINING, Phase.LISTENING, Phase.PREPARING)
"""Nothing has been given to the lead: the controller may abort by itself."""
UNDECIDED = (*BEFORE_GO, Phase.GOING, Phase.WITHDRAWING)


class SwitchDrive:
    """See the module. `failure` is set when the job cannot go on."""

    def __init__(self, desk: Desk, switch: LedgerSwitch, *, restarted: bool) -> None:
        self.desk = desk
        self.generation = switch.generation
        self.command_id = switch.command_id
        self.moves = switch.moves
        self.leaving = {rank: move for move in switch.moves for rank in desk.ranks_of(move.slot)}
        self.lead = min(self.leaving)
        self.phase = _phase_of(switch)
        self.restarted = restarted
        self.deadline_ms: float | None = None
        self.failure = ""
        self.gone = ""
        """Why no joiner can run any more; it is fatal if the lead leaves nevertheless."""
        self.built: dict[int, Built] = {}
        self.listening: dict[int, Ready] = {}
        self.linked: dict[int, frozenset[int]] = {}
        self.stayers_ready: dict[int, frozenset[int]] = {}
        self.joiners_ready: set[int] = set()
        self.running: dict[int, int] = {}
        self.measured: dict[int, Measured] = {}

    # -------------------------------------------------------------- what is said

    def begin(self) -> None:
        """JOIN to the joiners."""
        for move in self.moves:
            self.desk.send(move.joiner, self._join(move.slot))

    def resend(self, machine: Machine) -> None:
        """A machine has attached again: everything it must know of this switch, which all may hear twice."""
        mine = [rank for rank, move in self.leaving.items() if move.joiner == machine.machine_id]
        if mine:
            self.desk.send(machine.machine_id, self._join(self.desk.slot_of(mine[0])))
            for rank in mine:
                if self.phase is Phase.PREPARING:
                    self._prepare_joiner(rank)
                self.desk.to_rank(machine.machine_id, rank, Query(generation=self.generation))
        for rank, move in self.leaving.items():
            if move.leaver == machine.machine_id:
                self._resend_to_leaver(rank)
        if self.phase in (Phase.PREPARING, Phase.GOING):
            for rank in self._stayers():
                if self.desk.ledger.table[self.desk.slot_of(rank)] == machine.machine_id:
                    self._prepare_stayer(rank)

    def _resend_to_leaver(self, rank: int) -> None:
        if self.phase in (Phase.LISTENING, Phase.PREPARING):
            self._prepare_leaver(rank)
        if self.phase in (Phase.GOING, Phase.WITHDRAWING):
            if rank == self.lead and self.phase is Phase.WITHDRAWING:
                self._to_leaver(rank, Withdraw(generation=self.generation))
            elif rank == self.lead and not self.restarted:
                self._to_leaver(rank, Go(generation=self.generation))
            else:
                self._to_leaver(rank, Query(generation=self.generation))
            planned = tuple(s for s in sorted(self.linked.get(rank, ())) if rank in self.stayers_ready.get(s, ()))
            if planned:
                self._to_leaver(rank, Planned(generation=self.generation, stayers=planned))

    def _join(self, slot: int) -> StartRanks:
        return StartRanks(
            term=self.desk.term,
            generation=self.generation,
            slot=slot,
            ranks=self.desk.ranks_of(slot),
            endpoints=dict(self.desk.endpoints),
            slot_generations=tuple(self.desk.ledger.slot_generations),
        )

    def _to_leaver(self, rank: int, command: Abort | Go | Planned | PrepareLeaver | Query | Withdraw) -> None:
        self.desk.to_rank(self.leaving[rank].leaver, rank, command)

    def _prepare_leaver(self, rank: int) -> None:
        leavers = tuple(sorted(self.leaving))
        self._to_leaver(rank, PrepareLeaver(generation=self.generation, leavers=leavers, lead=self.lead))

    def _prepare_joiner(self, rank: int) -> None:
        ready = self.listening.get(rank)
        if ready is not None:
            transfer = PrepareJoiner(generation=self.generation, transfer=ready.transfer)
            self.desk.to_rank(self.leaving[rank].joiner, rank, transfer)

    def _prepare_stayer(self, rank: int) -> None:
        joiners = {
            leaver: self.built[leaver].endpoint
            for leaver, linked in sorted(self.linked.items())
            if rank in linked and leaver in self.built
        }
        if joiners:
            holder = self.desk.ledger.table[self.desk.slot_of(rank)]
            self.desk.to_rank(holder, rank, PrepareStayer(generation=self.generation, joiners=joiners))

    def _stayers(self) -> list[int]:
        return sorted({rank for linked in self.linked.values() for rank in linked if rank not in self.leaving})

    def _all_ready(self) -> bool:
        """Rule P3: GO only when each linked stayer is READY for each leaver that named it, and all joiners are."""
        stayers_ready = all(
            leaver in self.stayers_ready.get(stayer, ())
            for leaver, linked in self.linked.items()
            for stayer in linked
            if stayer not in self.leaving
        )
        return stayers_ready and self.joiners_ready >= set(self.leaving) and set(self.listening) >= set(self.leaving)

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
            case Withdrawn() if rank == self.lead and self.phase not in (Phase.LEFT, Phase.MEASURING):
                self.conclude(self.desk.ledger.switch.withdrawing if self.desk.ledger.switch else "withdrawn")
            case Stayed(why=why) if self.phase in (Phase.GOING, Phase.WITHDRAWING):
                self.conclude(f"the verdict was STAY: {why}", blamed=[move.joiner for move in self.moves])
            case Left(boundary=boundary):
                self._leave(boundary)
            case Running(iteration=iteration):
                self._leave(iteration)
                self.running[rank] = iteration
            case InDoubt():
                self._resolve(rank)
            case Measured():
                self.measured[rank] = report
            case Armed() | Cast() | _:
                pass
        self.advance()

    def _hear_built(self, rank: int, report: Built) -> None:
        ledger, move = self.desk.ledger, self.leaving[rank]
        self.built[rank] = report
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

    def _hear_leaver(self, rank: int, report: Ready) -> None:
        self.listening[rank] = report
        self._link(rank, report.linked)
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
            self.undo(f"global rank {rank} is not ready: {why}", blamed=[move.joiner for move in self.moves])

    def _resolve(self, rank: int) -> None:
        if self.phase in (Phase.LEFT, Phase.MEASURING):
            self.desk.to_rank(self.leaving[rank].joiner, rank, Resolve(generation=self.generation))
        elif self.phase in (Phase.GOING, Phase.WITHDRAWING):
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
            self.desk.journal(SwitchGo(time_ms=self.desk.now_ms, generation=self.generation))
            self._to_leaver(self.lead, Go(generation=self.generation))
            self._progress("all are ready; waiting for an iteration boundary")
        if self.phase is Phase.LEFT and set(self.running) >= everyone:
            self._done()

    def _mark(self) -> SwitchPhase:
        return SwitchPhase(time_ms=self.desk.now_ms, generation=self.generation, phase=self.phase.value)

    def undo(self, why: str, *, blamed: Iterable[str] = (), refused: Iterable[str] = ()) -> None:
        """Rule P3: before GO the controller aborts; after it, the lead must give up first."""
        if self.phase in BEFORE_GO:
            self.conclude(why, blamed=blamed, refused=refused)
        elif self.phase is Phase.GOING:
            self._enter("undo")
            entry = SwitchWithdraw(
                time_ms=self.desk.now_ms, generation=self.generation, why=why, blamed=tuple({*blamed, *refused})
            )
            self.desk.journal(entry)
            self._to_leaver(self.lead, Withdraw(generation=self.generation))

    def conclude(self, why: str, *, blamed: Iterable[str] = (), refused: Iterable[str] = ()) -> None:
        """It did not happen: written down, and all who prepared drop it."""
        knows_linked = set(self.linked) >= set(self.leaving)
        self.phase = Phase.OVER
        entry = SwitchAborted(
            time_ms=self.desk.now_ms,
            generation=self.generation,
            why=why or "withdrawn",
            blamed=tuple(sorted(set(blamed))),
            refused=tuple(sorted(set(refused))),
        )
        self.desk.journal(entry)
        self.desk.record("END", f"g{self.generation}", "aborted", entry.why)
        world = range(self.desk.spec.world_size)
        stayers = self._stayers() if knows_linked or not self.restarted else [r for r in world if r not in self.leaving]
        for rank in sorted(self.leaving):
            self._to_leaver(rank, Abort(generation=self.generation, why=entry.why))
        for rank in stayers:
            holder = self.desk.ledger.table[self.desk.slot_of(rank)]
            self.desk.to_rank(holder, rank, Abort(generation=self.generation, why=entry.why))
        for move in self.moves:
            self.desk.send(move.joiner, Discard(term=self.desk.term, generation=self.generation, why=entry.why))
        self._progress(f"aborted: {entry.why}")

    def _leave(self, boundary: int) -> None:
        if self.phase not in (Phase.GOING, Phase.WITHDRAWING):
            return
        self._enter("left")
        entry = SwitchLeft(time_ms=self.desk.now_ms, generation=self.generation, boundary=boundary)
        self.desk.journal(entry)
        for rank, built in self.built.items():
            self.desk.endpoints[rank] = built.endpoint
        self._progress(f"switched at iteration {boundary}; waiting for the first iteration")
        if self.gone:
            self.failure = f"{self.gone}, after the point of no return of generation {self.generation}"

    def _done(self) -> None:
        self._enter("running")
        self.desk.journal(SwitchDone(time_ms=self.desk.now_ms, generation=self.generation))
        for move in self.moves:
            self.desk.send(move.leaver, Release(term=self.desk.term, generation=self.generation))
        tell_table(self.desk)

    def joiner_gone(self, machine_id: str, why: str) -> None:
        """A joiner's process or machine is dead, or away for too long."""
        self.gone = self.gone or why
        if self.phase in UNDECIDED:
            self.undo(why, blamed=[machine_id])
        elif self.phase is Phase.LEFT:
            self.failure = f"{why}, after the point of no return of generation {self.generation}"

    def tick(self) -> None:
        """Deadlines of the phases, and joiners whose agents are away."""
        if self.deadline_ms is None:
            self.deadline_ms = self.desk.now_ms + self._limit()
        if self.phase in UNDECIDED and self.phase is not Phase.WITHDRAWING:
            for move in self.moves:
                machine = self.desk.members.get(move.joiner)
                lost_since = machine.lost_since_ms if machine else self.deadline_ms - self._limit()
                away_ms = self.desk.now_ms - lost_since
                if (machine is None or not machine.attached) and away_ms > self.desk.limits.agent_lost_ms:
                    self.joiner_gone(move.joiner, f"the agent of machine {move.joiner} is away for {away_ms:.0f} ms")
        if self.phase is not Phase.OVER and self.desk.now_ms > self.deadline_ms:
            self._expire()

    def _expire(self) -> None:
        late = f"'{self.phase.value}' took longer than {self._limit():.0f} ms"
        if self.phase is Phase.JOINING:
            slow = {self.leaving[rank].joiner for rank in self.leaving if rank not in self.built}
            self.undo(late, blamed=slow)
        elif self.phase in (Phase.LISTENING, Phase.PREPARING, Phase.GOING):
            self.undo(late)
        elif self.phase is Phase.LEFT:
            self.failure = f"{late}, after the point of no return of generation {self.generation}"

    def _limit(self) -> float:
        limits = self.desk.limits
        return {
            Phase.JOINING: limits.build_ms,
            Phase.LISTENING: limits.prepare_ms,
            Phase.PREPARING: limits.prepare_ms,
            Phase.GOING: limits.go_ms,
            Phase.LEFT: limits.running_ms,
            Phase.MEASURING: limits.measure_ms,
        }.get(self.phase, float("inf"))

    def _enter(self, event: str) -> None:
        self.phase = TRANSITIONS[self.phase, event]
        self.deadline_ms = self.desk.now_ms + self._limit()
        self.desk.record("INSTANT", f"g{self.generation}", self.phase.value)

    def _progress(self, text: str) -> None:
        self.desk.tell(self.command_id, ProgressLine(command_id=self.command_id, text=text))


def tell_table(desk: Desk) -> None:
    """TABLE to all machines that hold ranks."""
    directory = Directory(endpoints=dict(desk.endpoints), slot_generations=tuple(desk.ledger.slot_generations))
    for machine_id in desk.ledger.table:
        desk.send(machine_id, Table(term=desk.term, directory=directory))


def _phase_of(switch: LedgerSwitch) -> Phase:
    if switch.left:
        return Phase.MEASURING if switch.done else Phase.LEFT
    if switch.went:
        return Phase.WITHDRAWING if switch.withdrawing else Phase.GOING
    return Phase.JOINING
