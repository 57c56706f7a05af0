"""One simulated job: controller, machines, ranks and users, what connects them, and what is checked at each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from megatron.resilience.protocol import invariants
from megatron.resilience.protocol.controller_words import JobSpec
from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.invariants import Voter
from megatron.resilience.protocol.joiner import Joiner, JoinerState
from megatron.resilience.protocol.journal import SwitchBegun
from megatron.resilience.protocol.leaver import Leaver, LeaverState
from megatron.resilience.protocol.memory import Peak, Room
from megatron.resilience.protocol.messages import Built, Left, Note, RankReport, Ready
from megatron.resilience.protocol.vote import Contribution, combine
from tests.sim.controller import SimController
from tests.sim.machine import SimMachine
from tests.sim.transfers import Transfers
from tests.sim.users import Users
from tests.sim.world import Pipe, World

if TYPE_CHECKING:
    from tests.sim.faults import Faults
    from tests.sim.process import Process


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """A machine of a simulation."""

    machine_id: str
    rack: str = ""
    elastic: bool = False
    facts: Facts = field(default_factory=lambda: Facts(torch="2.13.0"))
    model_digest: str = "m1"
    ranks: int = 8
    memory_bytes: int = 1_000
    free_bytes: int = 1_000
    """What is left there when its ranks are built."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The layout of a simulation."""

    slots: int
    per_machine: int
    machines: tuple[MachineSpec, ...]
    links: tuple[tuple[int, int], ...]
    """Live at the beginning."""


class Job:
    """See the module."""

    def __init__(self, world: World, shape: Shape, faults: Faults) -> None:
        self.world, self.shape, self.faults = world, shape, faults
        self.per_machine, self.size = shape.per_machine, shape.slots * shape.per_machine
        self.links = {(min(a, b), max(a, b)) for a, b in shape.links}
        self.processes: list[Process] = []
        self.exit_requested = False
        self.saves: dict[int, float] = {}
        self.excuse = ""
        """Why the job may fail: it lost what only recovery could give back."""
        self.failed = ""
        self.crashed: set[str] = set()
        self.boundaries: dict[int, int] = {}
        self.verdicts: dict[int, bool] = {}
        self.iterations_done = 0
        self.last_iteration_ms = 0.0
        self._voters: dict[tuple[int, int], Voter] = {}
        self._holders: dict[tuple[int, int], str] = {}
        self._votes: dict[int, dict[int, tuple[Process, Voter, Contribution]]] = {}
        self._left: set[int] = set()
        self._died_whole: dict[int, str] = {}
        self._notes: dict[tuple[int, int], Pipe] = {}
        self.transfers = Transfers(self)
        self.users = Users(self)
        self.specs = {machine.machine_id: machine for machine in shape.machines}
        self.controller = SimController(
            self, JobSpec(job="sim", slots=shape.slots, ranks_per_machine=shape.per_machine)
        )
        self.machines = {
            spec.machine_id: SimMachine(self, spec.machine_id, rack=spec.rack, elastic=spec.elastic)
            for spec in shape.machines
        }

    # -------------------------------------------------------------- what machines are like

    def facts_of(self, machine_id: str) -> Facts:
        spec = self.specs[machine_id]
        return Facts(torch=spec.facts.torch, gpu=spec.facts.gpu, model_digest=spec.model_digest)

    def agent_facts_of(self, machine_id: str) -> Facts:
        return self.specs[machine_id].facts

    def capacity_of(self, machine_id: str) -> Capacity:
        spec = self.specs[machine_id]
        return Capacity(ranks=spec.ranks, memory_bytes=spec.memory_bytes)

    def memory_of(self, machine_id: str) -> int:
        return 100

    def measured(self, machine_id: str, report: RankReport) -> RankReport:
        """With what the shell of a real rank adds: its peak has 500 bytes."""
        match report:
            case Built(memory_bytes=memory):
                room = Room(host_held_bytes=memory, host_free_bytes=self.specs[machine_id].free_bytes)
                return msgspec.structs.replace(report, room=room)
            case Ready() if report.transfer:
                return msgspec.structs.replace(report, peak=Peak(host_bytes=500))
        return report

    def is_saving(self, global_rank: int) -> bool:
        return self.world.now_ms < self.saves.get(global_rank, 0.0)

    # -------------------------------------------------------------- who is where

    def moving(self, generation: int) -> tuple[int, ...]:
        """Ranks that move in a generation."""
        for entry in self.controller.entries:
            if isinstance(entry, SwitchBegun) and entry.generation == generation:
                return tuple(
                    rank
                    for move in entry.moves
                    for rank in range(move.slot * self.per_machine, (move.slot + 1) * self.per_machine)
                )
        raise AssertionError(f"generation {generation} was never begun")

    def peers_of(self, global_rank: int) -> list[int]:
        return sorted(b if a == global_rank else a for a, b in self.links if global_rank in (a, b))

    def holder(self, global_rank: int) -> Process | None:
        """The process that trains a rank, or stands at the boundary as its leaver."""
        alive = [p for p in self.processes if p.alive and p.global_rank == global_rank]
        living = [p for p in alive if p.is_holder]
        return living[-1] if living else None

    def is_reachable(self, process: Process, endpoint: str) -> bool:
        return any(other.alive and other.endpoint == endpoint for other in self.processes)

    # -------------------------------------------------------------- links, notes, votes

    def link_appears(self, a: int, b: int) -> None:
        """A link is used for the first time: both ends must agree to it, and a held one tries again later."""
        if (min(a, b), max(a, b)) in self.links or a == b:
            return
        ends = self.holder(a), self.holder(b)
        if any(end is None or end.iteration < 1 or end.holds_new_links or end.core.is_waiting for end in ends):
            self.world.after(self.world.between(5, 20), self.link_appears, a, b)
            return
        one, other = ends
        assert one is not None
        assert other is not None
        if not self._answers(one, b, other):
            self.world.after(self.world.between(5, 20), self.link_appears, a, b)
            return
        self.links.add((min(a, b), max(a, b)))
        self.world.say(f"ranks {a} and {b} link up")
        one.link_appears(b, other.generation)
        other.link_appears(a, one.generation)

    def _answers(self, caller: Process, peer: int, holder: Process) -> bool:
        """Whether the process that `caller` knows as `peer` is its holder; a leaver that is kept lets callers wait."""
        known = caller.directory[peer]
        if known == holder.endpoint:
            return True
        if not self.excuse and not any(process.alive and process.endpoint == known for process in self.processes):
            raise invariants.InvariantViolation(
                f"global rank {caller.global_rank} calls global rank {peer} at {known}, which has ended; it listens at "
                f"{holder.endpoint}"
            )
        return False

    def note(self, sender: Process, peer: int, note: Note) -> None:
        """To the process of `peer` that was there before the switch."""
        for target in reversed(self.processes):
            if not target.alive or target.global_rank != peer or target.generation >= note.generation:
                continue
            if target.is_holder or target.core.switch_generation == note.generation:
                key = (id(sender), id(target))
                if key not in self._notes:
                    self._notes[key] = Pipe(self.world, self._deliver, 0.2, 6)
                self._notes[key].send((sender.global_rank, target, note))
                return

    def _deliver(self, parcel: tuple[int, Process, Note]) -> None:
        sender, target, note = parcel
        if target.alive:
            target.hear_note(sender, note)

    def vote(self, process: Process, voter: Voter, contribution: Contribution) -> None:
        invariants.check_one_holder(voter, self._voters, self._holders)
        if process.state != voter.iteration:
            raise invariants.InvariantViolation(f"{voter} has the state of iteration {process.state}")
        self._voters[voter.iteration, voter.global_rank] = voter
        ballot = self._votes.setdefault(voter.iteration, {})
        ballot[voter.global_rank] = (process, voter, contribution)
        if len(ballot) == self.size:
            self._close_vote(voter.iteration, self._votes.pop(voter.iteration))

    def _close_vote(self, iteration: int, ballot: dict[int, tuple[Process, Voter, Contribution]]) -> None:
        for a, b in sorted(self.links):
            one, a_voter, _ = ballot[a]
            other, b_voter, _ = ballot[b]
            invariants.check_link(a_voter, b_voter, one.view[b], other.view[a])
        result = combine(contribution for _, _, contribution in ballot.values())
        self.iterations_done, self.last_iteration_ms = iteration, self.world.now_ms
        if result.cast:
            word = "vetoed" if result.veto else "granted"
            self.world.say(f"vote of iteration {iteration}: g{result.cast} cast, {word}")
        for process, _, _ in ballot.values():
            self.world.after(self.world.between(0.2, 4), process.vote_result, iteration, result)
        self.faults.vote_closes(iteration)

    # -------------------------------------------------------------- ends

    def verdict(self, process: Process, generation: int, *, leave: bool) -> None:
        if generation in self.boundaries:
            invariants.check_same_verdict(generation, process.global_rank, leave, self.verdicts)
        if leave:  # decided on an acknowledgement of the dead
            self.excuse = self.excuse or self._died_whole.get(generation, "")

    def left(self, lead: Process, report: Left) -> None:
        """The lead has decided LEAVE."""
        if report.generation in self._left:
            return
        self._left.add(report.generation)
        moving = self.moving(report.generation)
        whole = [
            process.global_rank
            for process in self.processes
            if process.generation == report.generation and process.state == report.boundary
        ]
        invariants.check_whole(report.generation, moving, whole)

    def ending(self, process: Process, exit_code: int, why: str) -> None:
        """Called while the process is still alive: may the job fail because of this?"""
        half = process.core.half
        if exit_code == 0 or self.controller.ledger.ended:
            return
        if isinstance(half, Joiner) and half.state is not JoinerState.LIVE:
            killed = why.startswith("its machine") or why == "killed"
            if killed and self.verdicts.get(half.generation) is True:
                self.excuse = self.excuse or f"joiner {process.name} died after LEAVE: {why}"
            elif killed and half.state in (JoinerState.WHOLE, JoinerState.DOUBT):
                self._died_whole[half.generation] = f"joiner {process.name} died after it had acknowledged: {why}"
        elif not (isinstance(half, Leaver) and half.state in (LeaverState.LEFT, LeaverState.ENDED)):
            if why.startswith("its machine") or why == "killed":
                self.excuse = self.excuse or f"{process.name} held a slot and died: {why}"
        elif why.startswith("its machine") or why == "killed":
            self.excuse = self.excuse or f"leaver {process.name} died before it was released"

    def ended(self, process: Process, exit_code: int) -> None:
        """Who is connected to it notices."""
        self.transfers.process_ended(process)
        if exit_code != 0 and not self.failed and process.is_holder:
            self.failed = f"{process.name} ended with {exit_code}"
        for other in self.processes:
            if not other.alive:
                continue
            delay_ms = self.world.between(1, 30)
            self.world.after(delay_ms, other.joiner_died, process.endpoint)
            if isinstance(process.core.half, Joiner) and process.core.half.state is not JoinerState.LIVE:
                continue
            if other.directory.get(process.global_rank) != process.endpoint:
                continue  # that rank is another process's, as this one knows
            self.world.after(delay_ms, other.peer_lost, process.global_rank)
            if process.is_holder and exit_code != 0 and not isinstance(other.core.half, Joiner):
                self.world.after(delay_ms, other.member_lost, process.global_rank)

    @property
    def is_over(self) -> bool:
        """All is decided and all processes are gone."""
        return self.controller.is_up and self.controller.ledger.ended and not any(p.alive for p in self.processes)

    @property
    def is_quiet(self) -> bool:
        """Nothing is under way: every command answered, every process settled."""
        ledger = self.controller.ledger
        if not self.controller.is_up or ledger.ended:
            return self.controller.is_up and ledger.ended
        return ledger.running and not ledger.queue and ledger.switch is None and self.users.all_answered
