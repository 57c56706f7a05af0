"""A rank's process in the simulation: a thin shell round `RankCore`, with a loop of iterations that only vote.

What it "trains" is a number: the iteration whose start its state belongs to. A joiner has none until the transfer.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron.resilience.protocol import invariants
from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.invariants import Voter
from megatron.resilience.protocol.joiner import Joiner, JoinerState
from megatron.resilience.protocol.leaver import Leaver, LeaverState
from megatron.resilience.protocol.messages import (
    Built,
    Directory,
    Left,
    Measured,
    Note,
    Progress,
    RankCommand,
    RankReport,
    StartRanks,
    WorkerHello,
)
from megatron.resilience.protocol.rank_core import RankCore
from megatron.resilience.protocol.stayer import Stayer
from megatron.resilience.protocol.switch import (
    AbortLinks,
    BoundaryReached,
    BuildFinished,
    CloseTransfer,
    CommandCame,
    CommitLinks,
    Contribute,
    EndProcess,
    Fail,
    FetchState,
    GoLive,
    HoldNewLinks,
    LinkAppeared,
    LinkBroke,
    LinksPrepared,
    ListenForTransfer,
    NoteCame,
    PeerLost,
    PrepareLinks,
    RankAction,
    RankEvent,
    Report,
    SendNote,
    SendState,
    SendVerdict,
    StartWait,
    TransferListening,
    UpdateDirectory,
    VoteClosed,
    VoteOpened,
    Wait,
    WaitedTooLong,
)
from megatron.resilience.protocol.vote import Contribution, Decision, decide
from tests.sim.addresses import Addresses
from tests.sim.wording import short
from tests.sim.world import Pipe

if TYPE_CHECKING:
    from tests.sim.job import Job
    from tests.sim.machine import SimMachine

LIMITS_MS = {
    Wait.LEAD_DECIDES: 400.0,
    Wait.LEAD_VERDICT: 900.0,
    Wait.LEAVER_VERDICT: 1_500.0,
    Wait.DOUBT: 6_000.0,
}
COLLECTIVE_LIMIT_MS = 10_000.0


class Loop(enum.Enum):
    """Where its training loop stands."""

    STARTING = "starting"
    AT_BOUNDARY = "at boundary"
    COMPUTING = "computing"
    VOTING = "voting"
    OVER = "over"


class Process:
    """See the module. `generation` is the one in which it was started."""

    def __init__(self, job: Job, machine: SimMachine, global_rank: int, generation: int, start: StartRanks) -> None:
        self.job, self.world, self.machine = job, job.world, machine
        self.global_rank, self.generation = global_rank, generation
        self.core = RankCore(global_rank, generation=generation if generation > 1 else None)
        self.loop = Loop.STARTING
        self.alive = True
        self.iteration = -1
        self.state: int | None = 1 if generation == 1 else None
        self.view = {rank: start.slot_generations[rank // job.per_machine] for rank in range(job.size)}
        """Peer -> generation of its slot, as this rank's link to it has it."""
        self.holds_new_links = False
        self.directory = Addresses(start.endpoints)
        self.is_built = False
        self.prepared: dict[int, Mapping[int, str]] = {}
        self.granted = 0
        self.to_machine = Pipe(job.world, lambda report: machine.rank_said(self, report), 0.1, 1.0)
        self.from_machine = Pipe(job.world, self.hear, 0.1, 1.0)
        self._wait = 0
        self._vote = 0

    @property
    def name(self) -> str:
        return f"{self.machine.machine_id}/{self.global_rank}"

    @property
    def endpoint(self) -> str:
        return f"{self.machine.machine_id}:{self.machine.incarnation}:{self.global_rank}:{self.generation}"

    @property
    def facts(self) -> Facts:
        return self.job.facts_of(self.machine.machine_id)

    # -------------------------------------------------------------- beginning

    def start(self) -> None:
        if not self.alive:
            return
        self.report(WorkerHello(generation=self.generation, endpoint=self.endpoint, facts=self.facts))
        self.world.after(self.world.between(5, 60), self._built)

    def _built(self) -> None:
        if not self.alive:
            return
        self.is_built = True
        memory = self.job.memory_of(self.machine.machine_id)
        if self.generation > 1:
            self.feed(BuildFinished(endpoint=self.endpoint, facts=self.facts, memory_bytes=memory))
            return
        self.report(Built(generation=self.generation, endpoint=self.endpoint, facts=self.facts, memory_bytes=memory))
        self._try_begin()

    def _try_begin(self) -> None:
        if (
            self.loop is Loop.STARTING
            and self.generation == 1
            and self.is_built
            and len(self.directory) == self.job.size
        ):
            for peer in self.job.peers_of(self.global_rank):
                self.feed(LinkAppeared(peer=peer))
            self._top(1)

    # -------------------------------------------------------------- the loop

    def _top(self, iteration: int) -> None:
        """The top of an iteration: evaluation and save of the one before are done."""
        if not self.alive:
            return
        self.iteration, self.loop = iteration, Loop.AT_BOUNDARY
        self.feed(BoundaryReached(iteration=iteration))

    def _go_on(self) -> None:
        """Leaves the boundary once the core does not wait there any more."""
        if not self.alive or self.loop is not Loop.AT_BOUNDARY or self.core.is_waiting or not self.core.is_member:
            return
        self.loop = Loop.COMPUTING
        self.world.after(self.world.between(15, 40), self._vote_now)

    def _vote_now(self) -> None:
        if not self.alive or self.loop is not Loop.COMPUTING:
            return
        self.loop = Loop.VOTING
        obstacles = ("a save is not finalised",) if self.job.is_saving(self.global_rank) else ()
        exits = self.job.exit_requested and self.global_rank == 0
        self.feed(VoteOpened(iteration=self.iteration, obstacles=obstacles, exits=exits))
        self._vote += 1
        vote = self._vote
        self.world.after(COLLECTIVE_LIMIT_MS, self._vote_too_long, vote)

    def _vote_too_long(self, vote: int) -> None:
        if self.alive and self.loop is Loop.VOTING and self._vote == vote:
            self.fail("CollectiveTimeout")

    def vote_result(self, iteration: int, result: Contribution) -> None:
        if not self.alive or self.loop is not Loop.VOTING or iteration != self.iteration:
            return
        self.feed(VoteClosed(iteration=iteration, result=result))
        decision = decide(result)
        self.state = iteration + 1
        if iteration % 10 == 0 and self.global_rank == 0:
            self.report(Progress(iteration=iteration, median_iteration_ms=10.0))
        if self.granted:
            self._measure(iteration)
        if decision is Decision.EXIT:
            self.loop = Loop.OVER
            self.end(0, "finished")
            return
        if decision is Decision.SWITCH:
            self.granted = result.cast
            invariants.check_one_boundary(result.cast, self.global_rank, iteration + 1, self.job.boundaries)
        self.loop = Loop.COMPUTING
        self.world.after(self.world.between(0, 8), self._top, iteration + 1)

    def _measure(self, iteration: int) -> None:
        generation, self.granted = self.granted, 0
        self.report(
            Measured(generation=generation, boundary=iteration, downtime_ms=1.0, lost_ms=1.0, median_iteration_ms=10.0)
        )

    # -------------------------------------------------------------- the shell round the core

    def feed(self, event: RankEvent) -> None:
        """One event into the core, and its actions out."""
        if not self.alive:
            return
        actions = self.core.step(event)
        if not self.core.is_waiting:
            self._wait += 1
        for action in actions:
            if self.alive:
                self._act(action)
        self._go_on()

    def hear(self, command: RankCommand) -> None:
        self.world.say(f"{self.name} <- {short(command)}")
        self.feed(CommandCame(command=command))

    def hear_note(self, sender: int, note: Note) -> None:
        self.world.say(f"{self.name} <- {short(note)} from {sender}")
        self.feed(NoteCame(sender=sender, note=note))

    def report(self, report: RankReport) -> None:
        report = self.job.measured(self.machine.machine_id, report)
        if not isinstance(report, Progress | Measured):
            self.world.say(f"{self.name} -> {short(report)}")
        self.to_machine.send(report)

    def _act(self, action: RankAction) -> None:
        job, world = self.job, self.world
        match action:
            case Report(report=report):
                if isinstance(report, Left):
                    job.left(self, report)
                self.report(report)
            case SendNote(peer=peer, note=note):
                job.note(self, peer, note)
            case Contribute(contribution=contribution):
                voter = Voter(
                    iteration=self.iteration,
                    global_rank=self.global_rank,
                    machine_id=self.machine.machine_id,
                    generation=self.generation,
                )
                job.vote(self, voter, contribution)
            case PrepareLinks(generation=generation, joiners=joiners):
                assert self.prepared.get(generation, joiners) == joiners, "links of one generation are prepared once"
                self.prepared[generation] = joiners
                world.after(world.between(1, 12), self._dialled, generation, joiners)
            case CommitLinks(generation=generation, joiners=joiners):
                job.verdict(self, generation, leave=True)
                for peer in joiners:
                    self.view[peer] = generation
                self.directory.learn(joiners)
                self.prepared.pop(generation, None)
            case AbortLinks(generation=generation):
                if generation in job.boundaries and self.granted == generation:
                    job.verdict(self, generation, leave=False)
                self.prepared.pop(generation, None)
            case ListenForTransfer(generation=generation):
                world.after(world.between(0.5, 4), self._listens, generation)
            case HoldNewLinks(hold=hold):
                self.holds_new_links = hold
            case StartWait(generation=generation, wait=wait):
                self._wait += 1
                token = self._wait
                world.after(LIMITS_MS[wait], self._waited, token, generation)
            case SendState() | FetchState() | SendVerdict() | CloseTransfer():
                self._transfer(action)
            case _:
                self._act_on_process(action)

    def _transfer(self, action: SendState | FetchState | SendVerdict | CloseTransfer) -> None:
        transfers = self.job.transfers
        match action:
            case SendState(generation=generation):
                transfers.gives(self, generation)
            case FetchState(generation=generation, address=address):
                transfers.fetches(self, generation, address)
            case SendVerdict(generation=generation, leave=leave):
                transfers.verdict(self, generation, leave)
            case CloseTransfer(generation=generation):
                transfers.close(self, generation)

    def _act_on_process(self, action: RankAction) -> None:
        match action:
            case UpdateDirectory(directory=directory):
                self._check(directory)
                self.directory.learn(directory.endpoints)
                self._try_begin()
            case GoLive(generation=generation):
                self._go_live(generation)
            case Fail(why=why):
                self.fail(why)
            case EndProcess(why=why):
                self.end(0, why)

    def _check(self, directory: Directory) -> None:
        """It is whole, and tells of each slot the process that has held it since its generation."""
        shape = self.job.shape
        assert sorted(directory.endpoints) == list(range(shape.slots * shape.per_machine)), directory
        for rank, endpoint in directory.endpoints.items():
            assert endpoint.endswith(f":{directory.slot_generations[rank // shape.per_machine]}"), directory

    def _go_live(self, generation: int) -> None:
        assert self.state is not None, "a joiner without state goes live"
        for move in self.job.moving(generation):
            self.view[move] = generation
        self.granted = generation
        self.iteration, self.loop = self.state, Loop.AT_BOUNDARY
        for peer in self.job.peers_of(self.global_rank):
            self.feed(LinkAppeared(peer=peer))

    def _listens(self, generation: int) -> None:
        self.job.transfers.listens(self, generation)
        self.feed(TransferListening(generation=generation, address=self.endpoint))

    def _dialled(self, generation: int, joiners: Mapping[int, str]) -> None:
        if self.prepared.get(generation) is not joiners:
            return
        for endpoint in joiners.values():
            if not self.job.is_reachable(self, endpoint):
                self.feed(LinkBroke(generation=generation, why=f"{endpoint} does not answer"))
                return
        self.feed(LinksPrepared(generation=generation))

    def _waited(self, token: int, generation: int) -> None:
        if self._wait == token and self.core.is_waiting:
            self.world.say(f"{self.name} waited too long")
            self.feed(WaitedTooLong(generation=generation))

    # -------------------------------------------------------------- what happens to it

    def link_appears(self, peer: int, generation: int) -> None:
        self.view[peer] = generation
        self.feed(LinkAppeared(peer=peer))

    def prepared_link_breaks(self) -> bool:
        """One of its prepared links breaks, if it has any."""
        for generation in sorted(self.prepared):
            self.world.say(f"a prepared link of {self.name} breaks")
            self.feed(LinkBroke(generation=generation, why="a prepared link broke"))
            return True
        return False

    def joiner_died(self, endpoint: str) -> None:
        """A prepared link to `endpoint` breaks."""
        for generation, joiners in sorted(self.prepared.items()):
            if endpoint in joiners.values():
                self.feed(LinkBroke(generation=generation, why=f"{endpoint} is gone"))

    def peer_lost(self, global_rank: int) -> None:
        self.feed(PeerLost(global_rank=global_rank))

    def member_lost(self, global_rank: int) -> None:
        """A rank that trains with this one is gone: whoever waits in a collective hears of it."""
        if self.alive and self.loop in (Loop.VOTING, Loop.COMPUTING, Loop.AT_BOUNDARY) and not self.core.is_waiting:
            self.fail(f"PeerLost({global_rank})")

    def fail(self, why: str) -> None:
        self.end(1, why)

    def end(self, exit_code: int, why: str) -> None:
        if not self.alive:
            return
        self.world.say(f"{self.name} ends with {exit_code}: {why}")
        self.job.ending(self, exit_code, why)
        self.alive = False
        self.from_machine.cut()
        self.world.after(self.world.between(0.2, 3), self.machine.process_ended, self, exit_code, why)
        self.job.ended(self, exit_code)

    def describe(self) -> str:
        return f"{self.name} g{self.generation} {self.loop.value} i{self.iteration} {self.core.half}"

    @property
    def is_holder(self) -> bool:
        """It trains, or would if the switch under way came to nothing."""
        half = self.core.half
        if isinstance(half, Joiner):
            return half.state is JoinerState.LIVE
        if isinstance(half, Leaver):
            return half.state not in (LeaverState.LEFT, LeaverState.ENDED)
        return isinstance(half, Stayer)
