"""The controller of one job, pure: `actions = core.step(event)`. Its shell does sockets, timers and the journal.

The job comes into being (all slots filled, all ranks built), runs, changes hands slot by slot as users ask (one
switch at a time, `switch_drive.py`), and ends. `replay` makes a core from a journal; agents then attach again, are
asked where they stand, and the command in flight is finished or undone. Training needs none of this to go on.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from megatron.resilience.protocol.admission import not_ours
from megatron.resilience.protocol.controller_commands import Commands
from megatron.resilience.protocol.controller_words import (
    AgentLost,
    AgentSaid,
    Close,
    ControllerAction,
    ControllerEvent,
    Desk,
    JobSpec,
    Limits,
    Send,
    Tick,
    UserAsked,
    UserLost,
)
from megatron.resilience.protocol.facts import differences
from megatron.resilience.protocol.journal import AnyEntry, JobEnded, JobRunning, JobStarted
from megatron.resilience.protocol.membership import Machine
from megatron.resilience.protocol.messages import (
    Abort,
    AgentHello,
    Built,
    Discard,
    FromRank,
    Progress,
    RankEnded,
    RankReport,
    Rejected,
    Release,
    StartRanks,
    StartRefused,
    StopJob,
    TableHeard,
    ToAgent,
    Welcome,
    WorkerHello,
)
from megatron.resilience.protocol.placement import natural
from megatron.resilience.protocol.switch_drive import AT_LEAD
from megatron.resilience.protocol.switch_sends import Phase, tell_table


class Standing(enum.Enum):
    """What a rank's process on a machine is."""

    HOLDER = "holder"
    LEAVER = "leaver"
    """It has left, and is kept until the joiners run (rule P7)."""
    JOINER = "joiner"
    MOVED = "moved"
    STRAY = "stray"


class ControllerCore:
    """See the module. `term` is higher than that of every controller of the job before."""

    def __init__(self, spec: JobSpec, *, term: int, limits: Limits | None = None) -> None:
        self.desk = Desk(spec=spec, limits=limits or Limits(), term=term)
        self.commands = Commands(self.desk)
        self._built: dict[int, Built] = {}
        self._ended_ranks: set[int] = set()

    def step(self, event: ControllerEvent) -> list[ControllerAction]:
        """Takes one event; returns what to do, in order."""
        desk = self.desk
        desk.now_ms, desk.actions = max(desk.now_ms, event.time_ms), []
        match event:
            case AgentSaid():
                self._hear(event)
            case AgentLost(connection=connection):
                desk.members.lose(connection, desk.now_ms)
            case UserAsked(client=client, command=command):
                self.commands.ask(client, command)
            case UserLost(client=client):
                self.commands.forget(client)
            case Tick():
                pass
        self._after_each_step()
        return desk.actions

    def _after_each_step(self) -> None:
        ledger = self.desk.ledger
        if not ledger.ended:
            self._try_start()
            self._try_run()
            drive = self.commands.drive
            if drive is not None:
                drive.tick()
                if drive.failure:
                    self.fail_job(drive.failure)
        if not ledger.ended:
            self.commands.pump()

    # -------------------------------------------------------------- the job's beginning and end

    def _try_start(self) -> None:
        """Fills all slots once enough machines that are not elastic are here."""
        desk = self.desk
        if desk.ledger.started:
            return
        free = desk.members.beginners
        if len(free) < desk.spec.slots:
            return
        chosen = sorted((machine.machine_id for machine in free), key=natural)[: desk.spec.slots]
        incarnations = tuple(desk.members.machines[machine_id].incarnation for machine_id in chosen)
        desk.journal(JobStarted(time_ms=desk.now_ms, machines=tuple(chosen), incarnations=incarnations))
        for slot, machine_id in enumerate(chosen):
            desk.send(machine_id, self._start(slot))

    def _start(self, slot: int) -> StartRanks:
        return StartRanks(
            term=self.desk.term,
            generation=1,
            slot=slot,
            ranks=self.desk.ranks_of(slot),
            endpoints={},
            slot_generations=tuple(self.desk.ledger.slot_generations),
        )

    def _try_run(self) -> None:
        """All ranks are built: the job runs, if they are alike."""
        desk, ledger = self.desk, self.desk.ledger
        if not ledger.started or ledger.running or len(self._built) < desk.spec.world_size:
            return
        facts = self._built[0].facts
        for rank, built in sorted(self._built.items()):
            differing = differences(built.facts, facts)
            if differing:
                self.fail_job(f"global rank {rank} is not like global rank 0: {'; '.join(differing)}")
                return
        slot_bytes = max(
            sum(self._built[rank].memory_bytes for rank in desk.ranks_of(slot)) for slot in range(desk.spec.slots)
        )
        desk.journal(
            JobRunning(
                time_ms=desk.now_ms,
                facts=facts,
                slot_memory_bytes=slot_bytes,
                endpoints=dict(sorted(desk.endpoints.items())),
            )
        )

    def fail_job(self, why: str) -> None:
        """A clear error and a clean end of all: what recovery will do better."""
        self._end_job(ok=False, why=why)

    def _end_job(self, *, ok: bool, why: str) -> None:
        if self.desk.ledger.ended:
            return
        self.commands.close(f"the job {'ended' if ok else 'failed'}: {why}")
        self.desk.journal(JobEnded(time_ms=self.desk.now_ms, ok=ok, why=why))
        for machine in self.desk.members.machines.values():
            self.desk.send(machine.machine_id, StopJob(term=self.desk.term, why=why, ok=ok))

    def untold(self) -> list[str]:
        """Machines that are known to the job and have not been sent its end: they were away."""
        told = {name for name, machine in self.desk.members.machines.items() if machine.is_told}
        return sorted({*self.desk.members.machines, *self.desk.ledger.table} - told, key=natural)

    # -------------------------------------------------------------- what agents say

    def _hear(self, event: AgentSaid) -> None:
        if isinstance(event.message, AgentHello):
            self._attach(event.connection, event.message)
            return
        machine = self.desk.members.of(event.connection)
        if machine is None:  # an older connection of a machine that has taken another
            return
        match event.message:
            case FromRank():
                self._hear_rank(machine, event.message)
            case RankEnded():
                self._hear_end(machine, event.message)
            case TableHeard(slot_generations=generations):
                if self.commands.drive is not None:
                    self.commands.drive.hear_told(machine.machine_id, generations)
            case StartRefused(generation=generation, why=why):
                machine.ranks = {rank: since for rank, since in machine.ranks.items() if since != generation}
                drive = self.commands.drive
                if drive is not None and drive.generation == generation:
                    drive.refuse(machine.machine_id, f"machine {machine.machine_id} refuses: {why}")
                elif generation == 1 and self.desk.ledger.slot_of(machine.machine_id) is not None:
                    self.fail_job(f"machine {machine.machine_id} cannot start its ranks: {why}")

    def _attach(self, connection: int, hello: AgentHello) -> None:
        desk = self.desk
        before = desk.members.get(hello.machine_id)
        old_connection = before.connection if before else None
        machine, refused, others = None, self._is_elsewhere(hello), not_ours(hello, desk.spec)
        if not refused and not others:
            machine, refused = desk.members.attach(connection, hello, desk.now_ms)
        if machine is None:
            self._turn_away(connection, hello, others or refused, final=bool(others))
            return
        if old_connection is not None and old_connection != connection:
            desk.actions.append(Close(connection=old_connection, why="the agent has a newer connection"))
        desk.send(machine.machine_id, Welcome(term=desk.term, job=desk.spec.job))
        if not desk.ledger.ended:
            self._fence(machine)
        if desk.ledger.ended:
            stop = StopJob(term=desk.term, why=desk.ledger.ended_why, ok=desk.ledger.ended_ok)
            desk.send(machine.machine_id, stop)
            return
        self._tell_again(machine)

    def _is_elsewhere(self, hello: AgentHello) -> str:
        """Why nothing may be learnt from `hello`; empty if it may.

        The agent that holds a slot trains on while its connection is lost, or this controller was: another start of it
        is believed once it had time to come back.
        """
        desk = self.desk
        if hello.term_seen > desk.term:
            return f"found term {desk.term}, the agent has seen {hello.term_seen}: a newer controller runs"
        slot, known = desk.ledger.slot_of(hello.machine_id), desk.members.get(hello.machine_id)
        if slot is None or desk.ledger.incarnations[slot] == hello.incarnation:
            return ""
        if known is None:
            may_come = not self.commands.is_awake()
        else:
            is_holder = known.incarnation == desk.ledger.incarnations[slot]
            is_new = not known.attached and desk.now_ms - known.lost_since_ms < desk.limits.settle_ms
            may_come = is_holder and is_new
        if not may_come:
            return ""
        return (
            f"found another agent of machine {hello.machine_id} away for a moment, which holds slot {slot}; expected "
            "one agent a machine; set another TRAINMOVER_MACHINE for this one, or end the other"
        )

    def _turn_away(self, connection: int, hello: AgentHello, why: str, *, final: bool) -> None:
        """It asks again, unless that is `final`. Once the job is over, all of its own who come hear of that."""
        desk = self.desk
        message = Rejected(term=desk.term, why=why, final=final)
        if desk.ledger.ended and not final:
            over = StopJob(term=desk.term, why=desk.ledger.ended_why, ok=desk.ledger.ended_ok)
            desk.actions.append(Send(connection=connection, machine_id=hello.machine_id, message=over))
            return
        desk.actions.append(Send(connection=connection, machine_id=hello.machine_id, message=message))
        desk.actions.append(Close(connection=connection, why=why))

    def _fence(self, machine: Machine) -> None:
        """Another start of its agent than the one that was given ranks: whatever ran there is gone (rule R8)."""
        why = f"machine {machine.machine_id} has started anew, its ranks are gone"
        drive, ledger = self.commands.drive, self.desk.ledger
        slot = ledger.slot_of(machine.machine_id)
        if slot is not None and ledger.incarnations[slot] != machine.incarnation:
            self.fail_job(why)
        if drive is not None and any(
            move.joiner == machine.machine_id and move.incarnation != machine.incarnation for move in drive.moves
        ):
            drive.joiner_gone(machine.machine_id, why)

    def _tell_again(self, machine: Machine) -> None:
        """All that a machine which attaches must know; everything may be heard twice."""
        desk, ledger = self.desk, self.desk.ledger
        slot = ledger.slot_of(machine.machine_id)
        if slot is not None and not ledger.running:
            desk.send(machine.machine_id, self._start(slot))
        if slot is not None:
            tell_table(desk, machine.machine_id)
        for generation in sorted(set(machine.ranks.values())):
            rank = next(rank for rank, started in machine.ranks.items() if started == generation)
            message = self._undoing(machine, rank, generation)
            if message is not None:
                desk.send(machine.machine_id, message)
        if ledger.over > 1:
            for rank, generation in sorted(machine.ranks.items()):
                if self._standing(machine, rank, generation) in (Standing.HOLDER, Standing.LEAVER):
                    desk.to_rank(machine.machine_id, rank, Abort(generation=ledger.over, why="it is over"))
        drive = self.commands.drive
        if drive is not None:
            drive.resend(machine)

    def _undoing(self, machine: Machine, rank: int, generation: int) -> ToAgent | None:
        if not self.desk.ledger.started:  # not ours to end: it may be another journal's job
            return None
        standing = self._standing(machine, rank, generation)
        if standing is Standing.MOVED:
            moved_in = self.desk.ledger.slot_generations[self.desk.slot_of(rank)]
            return Release(term=self.desk.term, generation=moved_in)
        if standing is Standing.STRAY:
            return Discard(term=self.desk.term, generation=generation, why="its switch is over")
        return None

    def _standing(self, machine: Machine, rank: int, generation: int) -> Standing:
        ledger, drive, slot = self.desk.ledger, self.commands.drive, self.desk.slot_of(rank)
        if not ledger.started or slot >= len(ledger.table):
            return Standing.STRAY
        if ledger.table[slot] == machine.machine_id and ledger.slot_generations[slot] == generation:
            return Standing.HOLDER
        if drive is not None and rank in drive.leaving:
            move = drive.leaving[rank]
            if machine.machine_id == move.joiner and generation == drive.generation:
                return Standing.JOINER
            if machine.machine_id == move.leaver and drive.phase is Phase.LEFT:
                return Standing.LEAVER
        if generation < ledger.slot_generations[slot]:
            return Standing.MOVED
        return Standing.STRAY

    # -------------------------------------------------------------- what ranks say

    def _hear_rank(self, machine: Machine, message: FromRank) -> None:
        rank, report = message.global_rank, message.report
        machine.ranks[rank] = message.generation
        standing = self._standing(machine, rank, message.generation)
        if standing in (Standing.MOVED, Standing.STRAY):
            undoing = self._undoing(machine, rank, message.generation)
            if undoing is not None and isinstance(report, WorkerHello):
                self.desk.send(machine.machine_id, undoing)
            return
        if standing is Standing.HOLDER:
            self._hear_holder(rank, report)
        drive = self.commands.drive
        if drive is None or isinstance(report, WorkerHello):
            return
        if isinstance(report, Progress):
            if standing is Standing.HOLDER:
                drive.hear_progress(report.iteration)
            return
        if report.generation == drive.generation:
            joins = standing is Standing.JOINER or (
                drive.leaving.get(rank) is not None and (drive.leaving[rank].joiner == machine.machine_id)
            )
            drive.hear(rank, report, is_joiner=joins)

    def _hear_holder(self, rank: int, report: RankReport) -> None:
        desk = self.desk
        match report:
            case WorkerHello(endpoint=endpoint) | Built(endpoint=endpoint):
                if isinstance(report, Built) and not desk.ledger.running:
                    self._built[rank] = report
                changed = desk.endpoints.get(rank) != endpoint
                desk.endpoints[rank] = endpoint
                if changed:
                    tell_table(desk)
            case Progress():
                desk.progress = max(desk.progress, (report.iteration, report.median_iteration_ms))
            case _:
                pass

    def _hear_end(self, machine: Machine, ended: RankEnded) -> None:
        rank, ledger, drive = ended.global_rank, self.desk.ledger, self.commands.drive
        standing = self._standing(machine, rank, ended.generation)
        if machine.ranks.get(rank) == ended.generation:
            del machine.ranks[rank]
            if not machine.ranks:
                machine.idle_since_ms = self.desk.now_ms
        if ledger.ended:
            return
        if standing is Standing.JOINER and drive is not None:
            if ended.exit_code == 0 and drive.phase in AT_LEAD:
                return  # it obeyed STAY, or trained to the job's end while nobody listened here: the lead knows
            why = ended.why or f"exit code {ended.exit_code}"
            drive.joiner_gone(machine.machine_id, f"global rank {rank} on machine {machine.machine_id} ended: {why}")
            return
        if standing is not Standing.HOLDER:
            return
        if ended.exit_code != 0:
            why = ended.why or f"exit code {ended.exit_code}"
            self.fail_job(f"global rank {rank} on machine {machine.machine_id} ended: {why}")
            return
        self._ended_ranks.add(rank)
        if len(self._ended_ranks) == self.desk.spec.world_size:
            self._end_job(ok=True, why="all ranks have finished")


def replay(spec: JobSpec, entries: Iterable[AnyEntry], *, term: int, limits: Limits | None = None) -> ControllerCore:
    """The core that wrote `entries`, as far as it had decided. Raises JournalError for a damaged journal."""
    core = ControllerCore(spec, term=term, limits=limits)
    for entry in entries:
        core.desk.ledger.apply(entry)
        core.desk.now_ms = max(core.desk.now_ms, entry.time_ms)
    core.desk.endpoints |= core.desk.ledger.endpoints
    core.commands.take_up()
    return core
