"""What the controller says in one switch, and to whom, from what it knows of it. All of it may be heard twice.

The base of `SwitchDrive`, which decides when.
"""

from __future__ import annotations

import enum

from megatron.resilience.protocol.controller_words import Desk
from megatron.resilience.protocol.journal import LedgerSwitch, Move
from megatron.resilience.protocol.membership import Machine
from megatron.resilience.protocol.messages import (
    Abort,
    Built,
    Directory,
    Discard,
    Go,
    Measured,
    Planned,
    PrepareJoiner,
    PrepareLeaver,
    PrepareStayer,
    ProgressLine,
    Query,
    Ready,
    StartRanks,
    Table,
    Withdraw,
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


class SwitchSends:
    """See the module. What is known of a switch is volatile: after a restart everything is asked again."""

    def __init__(self, desk: Desk, switch: LedgerSwitch, *, restarted: bool) -> None:
        self.desk = desk
        self.generation = switch.generation
        self.command_id = switch.command_id
        self.moves = switch.moves
        self.begun_ms = switch.marks[0][1]
        self.leaving = {rank: move for move in switch.moves for rank in desk.ranks_of(move.slot)}
        self.lead = min(self.leaving)
        self.phase = _phase_of(switch)
        self.restarted = restarted
        self.deadline_ms: float | None = None
        self.waits = ""
        """For whom, if a phase that has no end of its own lasts long."""
        self.failure = ""
        self.gone = ""
        """Why no joiner can run any more; it is fatal if the lead leaves nevertheless."""
        self.built: dict[int, Built] = {}
        self.listening: dict[int, Ready] = {}
        self.linked: dict[int, frozenset[int]] = {}
        self.stayers_ready: dict[int, frozenset[int]] = {}
        self.joiners_ready: set[int] = set()
        self.doubting: set[int] = set()
        self.running: dict[int, int] = {}
        self.measured: dict[int, Measured] = {}
        self.told: set[str] = set()
        """Machines whose ranks have the table with this generation in it."""
        self.leaver_peaks: dict[int, int] = {}

    def silent(self) -> set[str]:
        """Machines whose answer the present phase waits for."""
        match self.phase:
            case Phase.JOINING:
                return {move.joiner for rank, move in self.leaving.items() if rank not in self.built}
            case Phase.LISTENING:
                return {move.leaver for rank, move in self.leaving.items() if rank not in self.listening}
            case Phase.PREPARING:
                waited = {move.joiner for rank, move in self.leaving.items() if rank not in self.joiners_ready}
                unready = [
                    stayer
                    for leaver, linked in self.linked.items()
                    for stayer in linked - set(self.leaving)
                    if leaver not in self.stayers_ready.get(stayer, ())
                ]
                return waited | {self.desk.ledger.table[self.desk.slot_of(stayer)] for stayer in unready}
            case Phase.GOING | Phase.WITHDRAWING:
                return {self.leaving[self.lead].leaver}
            case Phase.LEFT if not set(self.running) >= set(self.leaving):
                return {move.joiner for rank, move in self.leaving.items() if rank not in self.running}
            case Phase.LEFT:
                return set(self.desk.ledger.table) - self.told
            case _:
                return set()

    # -------------------------------------------------------------- what is said

    def begin(self) -> None:
        """JOIN to the joiners."""
        for move in self.moves:
            self._join(move)

    def resend(self, machine: Machine) -> None:
        """A machine has attached again: everything it must know of this switch, which all may hear twice."""
        mine = [rank for rank, move in self.leaving.items() if move.joiner == machine.machine_id]
        if mine:
            self._join(self.leaving[mine[0]])
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

    def _join(self, move: Move) -> None:
        """A joiner is told where all listen at its start, and not again."""
        start = StartRanks(
            term=self.desk.term,
            generation=self.generation,
            slot=move.slot,
            ranks=self.desk.ranks_of(move.slot),
            endpoints=dict(self.desk.endpoints),
            slot_generations=tuple(self.desk.ledger.slot_generations),
        )
        self.desk.send(move.joiner, start)

    def _to_leaver(self, rank: int, command: Abort | Go | Planned | PrepareLeaver | Query | Withdraw) -> None:
        self.desk.to_rank(self.leaving[rank].leaver, rank, command)

    def _since_ms(self) -> float:
        return float(round(self.desk.now_ms - self.begun_ms))

    def _prepare_leaver(self, rank: int) -> None:
        leavers = tuple(sorted(self.leaving))
        prepare = PrepareLeaver(generation=self.generation, leavers=leavers, lead=self.lead, since_ms=self._since_ms())
        self._to_leaver(rank, prepare)

    def _prepare_joiner(self, rank: int) -> None:
        ready = self.listening.get(rank)
        if ready is not None:
            joiners = {joiner: built.endpoint for joiner, built in sorted(self.built.items())}
            prepare = PrepareJoiner(generation=self.generation, transfer=ready.transfer, joiners=joiners)
            self.desk.to_rank(self.leaving[rank].joiner, rank, prepare)

    def _prepare_stayer(self, rank: int) -> None:
        """Not before all joiners are known: links of one generation are prepared once. `advance` sees to it then."""
        linked = tuple(leaver for leaver, peers in sorted(self.linked.items()) if rank in peers)
        if not linked or set(self.built) < set(self.leaving):
            return
        joiners = {joiner: built.endpoint for joiner, built in sorted(self.built.items())}
        holder = self.desk.ledger.table[self.desk.slot_of(rank)]
        prepare = PrepareStayer(generation=self.generation, joiners=joiners, linked=linked, since_ms=self._since_ms())
        self.desk.to_rank(holder, rank, prepare)

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

    def _say_aborted(self, why: str) -> None:
        """To all who may have prepared something."""
        knows_linked = set(self.linked) >= set(self.leaving)
        world = range(self.desk.spec.world_size)
        stayers = self._stayers() if knows_linked or not self.restarted else [r for r in world if r not in self.leaving]
        for rank in sorted(self.leaving):
            self._to_leaver(rank, Abort(generation=self.generation, why=why))
        for rank in stayers:
            holder = self.desk.ledger.table[self.desk.slot_of(rank)]
            self.desk.to_rank(holder, rank, Abort(generation=self.generation, why=why))
        for move in self.moves:
            self.desk.send(move.joiner, Discard(term=self.desk.term, generation=self.generation, why=why))

    def _progress(self, text: str) -> None:
        self.desk.tell(self.command_id, ProgressLine(command_id=self.command_id, text=text))


def tell_table(desk: Desk, *machine_ids: str) -> None:
    """TABLE to all machines that hold ranks, or to these, once it is whole: when the last rank is heard of."""
    if not desk.directory_is_whole:
        return
    directory = Directory(endpoints=dict(desk.endpoints), slot_generations=tuple(desk.ledger.slot_generations))
    for machine_id in machine_ids or desk.ledger.table:
        desk.send(machine_id, Table(term=desk.term, directory=directory))


def _phase_of(switch: LedgerSwitch) -> Phase:
    if switch.left:
        return Phase.MEASURING if switch.done else Phase.LEFT
    if switch.went:
        return Phase.WITHDRAWING if switch.withdrawing else Phase.GOING
    return Phase.JOINING
