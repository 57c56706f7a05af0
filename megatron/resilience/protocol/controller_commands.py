"""What users ask of the controller, and the queue of migrations: one switch at a time, the next candidate after a
failed one, an answer to everyone who waits. A part of the controller's core.
"""

from __future__ import annotations

from megatron.resilience.protocol.controller_words import Answer, Desk
from megatron.resilience.protocol.incidents import Cost, Incident, milliseconds, with_costs
from megatron.resilience.protocol.journal import (
    Command,
    CommandEnded,
    CommandTaken,
    Ledger,
    LedgerSwitch,
    SwitchBegun,
    SwitchMeasured,
    incident_of,
)
from megatron.resilience.protocol.messages import (
    Accepted,
    AskIncidents,
    AskStatus,
    Finished,
    IncidentsAnswer,
    MachineView,
    Migrate,
    ProgressLine,
    Refused,
    StatusAnswer,
    UserCommand,
)
from megatron.resilience.protocol.placement import natural
from megatron.resilience.protocol.refusals import choose, may_become_free, need, why_not
from megatron.resilience.protocol.switch_drive import UNDECIDED, SwitchDrive
from megatron.resilience.protocol.switch_sends import Phase


def next_generation(ledger: Ledger) -> int:
    """Rule P1: above every one that was ever used, also for what came to nothing."""
    return ledger.generation + 1


class Commands:
    """See the module. `drive` is the switch under way."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.drive: SwitchDrive | None = None
        self._wakes_ms: float | None = None
        """After a restart: until when agents are waited for."""
        self._restarted = False
        self._waiting_ms: dict[str, float] = {}
        """Command -> since when it waits for released ranks to end, or for its leaver's agent."""
        self.waits = ""
        """For whom the next try waits."""

    def take_up(self) -> None:
        """After a replay: the switch in flight is driven on from what is written down."""
        self._restarted = self.desk.ledger.started
        if self.desk.ledger.switch is not None:
            self.drive = SwitchDrive(self.desk, self.desk.ledger.switch, restarted=True)

    # -------------------------------------------------------------- what users ask

    def ask(self, client: int, command: UserCommand) -> None:
        """One command of a user."""
        match command:
            case Migrate():
                self._migrate(client, command)
            case AskStatus():
                self.desk.actions.append(Answer(client=client, message=self.status()))
            case AskIncidents():
                self.desk.actions.append(Answer(client=client, message=IncidentsAnswer(incidents=self.incidents())))

    def forget(self, client: int) -> None:
        """A user has gone; the command goes on."""
        for clients in self.desk.clients.values():
            clients.discard(client)

    def _migrate(self, client: int, migrate: Migrate) -> None:
        desk, ledger = self.desk, self.desk.ledger
        ended = ledger.answers.get(migrate.command_id)
        if ended is not None:
            desk.actions.append(Answer(client=client, message=self._finished(ended)))
            return
        if ledger.command(migrate.command_id) is None:
            slot_need = need(ledger, desk.spec.ranks_per_machine)
            why = why_not(migrate, ledger, desk.members, slot_need, settled=self.is_awake())
            if why:
                desk.actions.append(Answer(client=client, message=Refused(command_id=migrate.command_id, why=why)))
                return
            entry = CommandTaken(
                time_ms=desk.now_ms, command_id=migrate.command_id, leavers=migrate.leavers, to=migrate.to
            )
            desk.journal(entry)
        desk.clients.setdefault(migrate.command_id, set()).add(client)
        ahead = [command.command_id for command in ledger.queue].index(migrate.command_id)
        text = f"queued behind {ahead} other migration{'s' if ahead > 1 else ''}" if ahead else "begins"
        desk.actions.append(Answer(client=client, message=Accepted(command_id=migrate.command_id, text=text)))

    # -------------------------------------------------------------- the queue

    def pump(self) -> None:
        """Ends what is over and begins what is next."""
        drive = self.drive
        if drive is not None and drive.phase is Phase.MEASURING:
            is_late = drive.deadline_ms is not None and self.desk.now_ms >= drive.deadline_ms
            if is_late or len(drive.measured) >= self.desk.spec.world_size:
                self._measured(drive)
        if self.drive is not None and self.drive.phase is Phase.OVER:
            self.drive = None
        if self.is_awake() and self.drive is None and self.desk.ledger.queue:
            self._begin(self.desk.ledger.queue[0])

    def is_awake(self) -> bool:
        """After a restart nothing begins before agents had time to attach."""
        if not self._restarted:
            return True
        if self._wakes_ms is None:
            self._wakes_ms = self.desk.now_ms + self.desk.limits.settle_ms
        return self.desk.now_ms >= self._wakes_ms

    def _begin(self, command: Command) -> None:
        desk, ledger = self.desk, self.desk.ledger
        if self._end_fulfilled(command):
            return
        last = ledger.incidents.get(ledger.generation)
        before = f"; the last try: {last.why}" if command.attempts and last is not None else ""
        if command.attempts >= desk.limits.attempts_max:
            self._end(command.command_id, ok=False, text=f"given up after {command.attempts} tries{before}")
            return
        if self._waits_for_leavers(command, before):
            return
        choice = choose(command, ledger, desk.members, need(ledger, desk.spec.ranks_per_machine))
        if choice.why:
            since_ms = self._waiting_ms.setdefault(command.command_id, desk.now_ms)
            may_wait = not choice.is_final and may_become_free(ledger, desk.members, command.refused)
            if may_wait and desk.now_ms - since_ms < desk.limits.release_ms:
                return
            self._end(command.command_id, ok=False, text=choice.why + before)
            return
        entry = SwitchBegun(
            time_ms=desk.now_ms,
            generation=next_generation(ledger),
            command_id=command.command_id,
            moves=choice.moves,
        )
        desk.journal(entry)
        said = "; ".join(f"slot {m.slot}: {m.leaver} -> {m.joiner} ({m.reason})" for m in choice.moves)
        desk.record("BEGIN", f"g{entry.generation}", "migration", said)
        assert ledger.switch is not None
        self.drive = SwitchDrive(desk, ledger.switch, restarted=False)
        desk.tell(command.command_id, ProgressLine(command_id=command.command_id, text=f"preparing {said}"))
        self.drive.begin()

    def _end_fulfilled(self, command: Command) -> bool:
        """Whether its switch was done before the controller died, which could not say so any more; then it says so."""
        done = self.desk.ledger.fulfilled.get(command.command_id)
        if done is not None:
            self._end(command.command_id, ok=True, text=_told(self.desk.ledger.incidents[done]))
        return done is not None

    def _waits_for_leavers(self, command: Command, before: str) -> bool:
        """A leaver whose agent is away cannot be told anything: no try begins, nor is a joiner blamed for it."""
        desk, members = self.desk, self.desk.members
        away = [
            leaver
            for leaver in command.leavers
            if desk.ledger.slot_of(leaver) is not None and ((one := members.get(leaver)) is None or not one.attached)
        ]
        if not away:
            self.waits = ""
            return False
        why = f"the agent of {', '.join(away)}, which is to leave, is away"
        if not self.waits:
            desk.tell(command.command_id, ProgressLine(command_id=command.command_id, text=f"waiting: {why}"))
        self.waits = why
        since_ms = self._waiting_ms.setdefault(command.command_id, desk.now_ms)
        if desk.now_ms - since_ms >= desk.limits.release_ms:
            self._end(command.command_id, ok=False, text=why + before)
        return True

    def _measured(self, drive: SwitchDrive) -> None:
        desk, switch = self.desk, self.desk.ledger.switch
        assert switch is not None
        costs = [
            Cost(
                downtime_ms=one.downtime_ms,
                lost_ms=one.lost_ms,
                links_kept=one.links_kept,
                links_replaced=one.links_replaced,
                bytes_moved=one.bytes_moved,
                memory_before_bytes=one.memory_before_bytes,
                memory_after_bytes=one.memory_after_bytes,
                global_rank=rank,
                peaks_bytes=(drive.leaver_peaks.get(rank, 0), one.peak_bytes) if rank in drive.leaving else None,
            )
            for rank, one in sorted(drive.measured.items())
        ]
        boundary = desk.ledger.boundaries[drive.generation]
        done = incident_of(switch, outcome="done", end_ms=desk.now_ms, boundary=boundary)
        incident = with_costs(done, costs)
        desk.journal(SwitchMeasured(time_ms=desk.now_ms, generation=drive.generation, incident=incident))
        desk.record("END", f"g{drive.generation}", "done", f"downtime {milliseconds(incident.downtime_ms)}")
        self.drive = None
        if desk.ledger.command(drive.command_id) is not None:
            self._end(drive.command_id, ok=True, text=_told(incident))

    def _end(self, command_id: str, *, ok: bool, text: str) -> None:
        desk = self.desk
        desk.journal(CommandEnded(time_ms=desk.now_ms, command_id=command_id, ok=ok, text=text))
        desk.tell(command_id, self._finished(desk.ledger.answers[command_id]))
        desk.clients.pop(command_id, None)
        self._waiting_ms.pop(command_id, None)
        self.waits = ""

    def _finished(self, ended: CommandEnded) -> Finished:
        done = self.desk.ledger.fulfilled.get(ended.command_id)
        incident = None if done is None or not ended.ok else self.desk.ledger.incidents.get(done)
        return Finished(command_id=ended.command_id, ok=ended.ok, text=ended.text, incident=incident)

    def close(self, why: str) -> None:
        """The job is over: nothing begins any more, and what was under way has come to nothing unless it had left."""
        drive = self.drive
        if drive is not None and drive.phase in UNDECIDED:
            drive.conclude("ended", why)
            self.drive = None
        elif drive is not None and drive.phase is Phase.MEASURING:
            self._measured(drive)  # the last iteration began with it: nobody comes to measure more
        for command in list(self.desk.ledger.queue):
            if not self._end_fulfilled(command):
                self._end(command.command_id, ok=False, text=why)

    # -------------------------------------------------------------- what users see

    def incidents(self) -> tuple[Incident, ...]:
        """All, oldest first, with the one under way."""
        known = dict(self.desk.ledger.incidents)
        if self.drive is not None and self.desk.ledger.switch is not None:
            known[self.drive.generation] = self._present(self.drive, self.desk.ledger.switch)
        return tuple(known[generation] for generation in sorted(known))

    def _present(self, drive: SwitchDrive, switch: LedgerSwitch) -> Incident:
        outcome = "failed" if self.desk.ledger.ended else drive.phase.value
        boundary = self.desk.ledger.boundaries.get(drive.generation, -1)
        return incident_of(switch, outcome=outcome, why=drive.failure, end_ms=self.desk.now_ms, boundary=boundary)

    def status(self) -> StatusAnswer:
        """All that `trainmover status` shows."""
        ledger, spec = self.desk.ledger, self.desk.spec
        state = "running" if ledger.running else "starting" if ledger.started else "assembling"
        if ledger.ended:
            state = "ended" if ledger.ended_ok else "failed"
        here = len(self.desk.members.beginners)
        gathers = "" if ledger.started or ledger.ended else f"{here} of {spec.slots} machines are here"
        return StatusAnswer(
            job=spec.job,
            state=state,
            why=ledger.ended_why or gathers,
            term=self.desk.term,
            generation=ledger.generation,
            iteration=self.desk.progress[0],
            median_iteration_ms=self.desk.progress[1],
            machines=self._machines(),
            switch=self._switch(),
            queued=tuple(command.command_id for command in ledger.queue[1:]),
        )

    def _switch(self) -> str:
        if self.drive is None:
            return self.waits
        return self.drive.waits or self.drive.phase.value

    def _machines(self) -> tuple[MachineView, ...]:
        ledger = self.desk.ledger
        views = []
        for machine_id in sorted({*self.desk.members.machines, *ledger.table}, key=natural):
            machine, slot = self.desk.members.get(machine_id), ledger.slot_of(machine_id)
            joins = self.drive is not None and any(move.joiner == machine_id for move in self.drive.moves)
            leaves = self.drive is not None and any(move.leaver == machine_id for move in self.drive.moves)
            views.append(
                MachineView(
                    machine_id=machine_id,
                    incarnation=machine.incarnation if machine else 0,
                    rack=machine.rack if machine else "",
                    attached=machine is not None and machine.attached,
                    slot=slot,
                    generation=ledger.slot_generations[slot] if slot is not None else 0,
                    state="joining" if joins else "leaving" if leaves else "training" if slot is not None else "free",
                )
            )
        return tuple(views)


def _told(incident: Incident) -> str:
    """The line that ends a migration."""
    moves = zip(incident.slots, incident.leavers, incident.joiners, strict=True)
    moved = ", ".join(f"slot {slot} from {leaver} to {joiner}" for slot, leaver, joiner in moves)
    return f"{moved} at iteration {incident.boundary}, downtime {milliseconds(incident.downtime_ms)}"
