"""One rank's part in switches: which half it is in, what belongs to another generation, what waits for the boundary.

The worker's shell holds one `RankCore`, feeds it events from its agent, its links, its transfer and its loop, and
carries out the actions. `step` may be called from any one thread at a time. While `is_waiting` is True at the top of
an iteration, the loop must feed events before it goes on.
"""

from __future__ import annotations

from collections import deque

from megatron.resilience.protocol import joiner, leaver, stayer
from megatron.resilience.protocol.joiner import Joiner, JoinerState
from megatron.resilience.protocol.leaver import Leaver, LeaverState
from megatron.resilience.protocol.messages import (
    Abort,
    Directory,
    Go,
    LeaveJob,
    Planned,
    PrepareJoiner,
    PrepareLeaver,
    PrepareStayer,
    Query,
    RankCommand,
    RankReport,
    Resolve,
    Running,
    Stayed,
    SwitchCommand,
    Unready,
    Withdraw,
    Withdrawn,
)
from megatron.resilience.protocol.stayer import Stayer, StayerState
from megatron.resilience.protocol.switch import (
    BoundaryReached,
    BuildFinished,
    CommandCame,
    Contribute,
    EndProcess,
    LinkAppeared,
    NoteCame,
    PeerLost,
    RankAction,
    RankEvent,
    Report,
    UpdateDirectory,
    VoteClosed,
    VoteOpened,
)
from megatron.resilience.protocol.vote import Decision, boundary_of, contribution, decide

_BOUND = (StayerState.GRANTED, LeaverState.GRANTED)

Half = Stayer | Leaver | Joiner


class RankCore:
    """See the module. `generation` is given to a joiner alone: the switch that it was started for."""

    def __init__(self, global_rank: int, *, generation: int | None = None) -> None:
        self.global_rank = global_rank
        self.half: Half = Stayer(global_rank=global_rank)
        if generation is not None:
            self.half = Joiner(global_rank=global_rank, generation=generation)
        self.floor = 1
        """Newest generation that is over for this rank: nothing older is listened to (rule P1)."""
        self.outcome: RankReport | None = None
        """How generation `floor` ended here, for who asks again."""
        self.links: frozenset[int] = frozenset()
        """Peers that it has live links to."""
        self._votes = False
        """It has voted and does not know the result: what it said binds it, so what comes meanwhile waits."""
        self._waiting: deque[RankEvent] = deque()
        """Of the vote. Bounded, as nothing is in it twice."""
        self._deferred: deque[SwitchCommand] = deque()
        """Commands of later generations, until the present switch has come to its end. Bounded alike."""
        self._directory: Directory | None = None
        """One that has the present switch's outcome already, until this rank has it too."""

    @property
    def is_waiting(self) -> bool:
        """At the top of an iteration: not before this is False may the rank train."""
        return self.half.at_boundary

    @property
    def is_member(self) -> bool:
        """It takes part in votes: no joiner before its verdict, no leaver after it."""
        if isinstance(self.half, Joiner):
            return self.half.state is JoinerState.LIVE
        return not (isinstance(self.half, Leaver) and self.half.state in (LeaverState.LEFT, LeaverState.ENDED))

    @property
    def switch_generation(self) -> int:
        """Of the switch that it takes part in, or 0."""
        return self.half.generation

    def step(self, event: RankEvent) -> list[RankAction]:
        """Takes one event; returns what to do, in order. Raises ImpossibleTransition for what cannot be."""
        if isinstance(event, VoteClosed):
            self._votes = False
            actions = self._close_vote(event)
            while self._waiting:
                actions += self._take(self._waiting.popleft())
            return actions + self._take_up_deferred()
        if self._votes and not (isinstance(event, CommandCame) and isinstance(event.command, Directory | LeaveJob)):
            if event not in self._waiting:
                self._waiting.append(event)
            return []
        return self._take(event)

    def _take(self, event: RankEvent) -> list[RankAction]:
        match event:
            case CommandCame(command=command):
                actions = self._obey(command)
            case VoteOpened():
                self._votes = True
                actions = self._open_vote(event)
            case LinkAppeared(peer=peer):
                self.links |= {peer}
                actions = self._feed(event)
            case BoundaryReached() | PeerLost() | BuildFinished():
                actions = self._feed(event)
            case NoteCame():
                actions = self._feed(event) if event.note.generation == self.half.generation else []
            case VoteClosed():
                raise AssertionError("step() takes it")
            case _:
                actions = self._feed(event) if event.generation == self.half.generation else []
        return actions + self._take_up_deferred()

    def _feed(self, event: RankEvent) -> list[RankAction]:
        match self.half:
            case Stayer(state=StayerState.FAR) if not isinstance(event, NoteCame):
                return []
            case Stayer():
                half, actions = stayer.step(self.half, event)
                self._now(half)
            case Leaver():
                left, actions = leaver.step(self.half, event)
                self._now(left, actions)
            case Joiner():
                joined, actions = joiner.step(self.half, event)
                self._now(joined, actions)
        return actions

    def _now(self, half: Half, actions: list[RankAction] | None = None) -> None:
        """Takes the new half; what is over makes a stayer of the rank, and raises the floor."""
        before, self.half = self.half, half
        over = (isinstance(half, Leaver) and half.state is LeaverState.OVER) or (
            isinstance(half, Joiner) and half.state is JoinerState.SETTLED
        )
        if over:
            self.half = Stayer(global_rank=self.global_rank)
        if before.generation and not self.half.generation:
            self.floor = max(self.floor, before.generation)
            self.outcome = None
            for action in actions or []:
                if isinstance(action, Report) and isinstance(action.report, Stayed | Withdrawn | Running):
                    self.outcome = action.report

    def _open_vote(self, event: VoteOpened) -> list[RankAction]:
        reasons = event.obstacles
        cast = 0
        if isinstance(self.half, Leaver):
            self.half = leaver.vote_opens(self.half)
            reasons, cast = (*reasons, *leaver.obstacles(self.half)), leaver.casts(self.half)
        elif isinstance(self.half, Stayer):
            reasons = (*reasons, *stayer.obstacles(self.half))
        return [Contribute(contribution=contribution(cast=cast, obstacles=reasons, exits=event.exits))]

    def _close_vote(self, event: VoteClosed) -> list[RankAction]:
        decision = decide(event.result)
        granted = decision is Decision.SWITCH and event.result.cast == self.half.generation
        boundary = boundary_of(event.iteration)
        match self.half:
            case Stayer() if granted:
                self.half, actions = stayer.grant(self.half, boundary)
                return actions
            case Leaver():
                half, actions = leaver.vote_closes(self.half, granted=granted, boundary=boundary)
                self._now(half, actions)
                return actions
            case Joiner():
                return self._feed(event)
        return []

    # -------------------------------------------------------------- commands

    def _obey(self, command: RankCommand) -> list[RankAction]:
        if isinstance(command, Directory):
            return self._hear_directory(command)
        if isinstance(command, LeaveJob):
            return self._leave_job(command)
        return self._obey_in_switch(command)

    def _hear_directory(self, directory: Directory) -> list[RankAction]:
        """Whoever hears that a leaver's rank is another process's turns from the leaver, and would miss its verdict."""
        if self.half.generation in directory.slot_generations:
            self._directory = directory
            return []
        self._directory = None
        return [UpdateDirectory(directory=directory)]

    def _obey_in_switch(self, command: SwitchCommand) -> list[RankAction]:
        mine = self.half.generation
        if command.generation > max(mine, self.floor) and self._is_bound():
            if command not in self._deferred:
                self._deferred.append(command)
            return []
        match self.half:
            case Joiner():
                return self._obey_as_joiner(self.half, command)
            case Leaver() if command.generation == mine:
                return self._obey_as_leaver(self.half, command)
            case Stayer() if command.generation == mine:
                return self._obey_as_stayer(self.half, command)
        if command.generation > max(mine, self.floor):
            return self._begin(command)
        return self._answer_old(command)

    def _is_bound(self) -> bool:
        """The present switch is granted: it comes to its own end, and later ones wait."""
        return self.half.at_boundary or self.half.state in _BOUND

    def _leave_job(self, command: LeaveJob) -> list[RankAction]:
        if not isinstance(self.half, Leaver) or command.generation < self.half.generation:
            return [EndProcess(why=f"the slot has moved in generation {command.generation}")]
        self.half, actions = leaver.release(self.half)
        return actions

    def _begin(self, command: SwitchCommand) -> list[RankAction]:
        """A newer generation than the one that it knew: whatever was prepared for that is dropped."""
        dropped: list[RankAction] = self._drop("a newer generation begins")
        match command:
            case PrepareStayer():
                self.half, actions = stayer.prepare(Stayer(global_rank=self.global_rank), command)
                return dropped + actions
            case PrepareLeaver():
                self.half, actions = leaver.start(
                    self.global_rank, command.generation, frozenset(command.leavers), command.lead, self.links
                )
                return dropped + actions
            case Abort():
                self.floor, self.outcome = command.generation, None
                return dropped
            case Withdraw():
                self.floor, self.outcome = command.generation, Withdrawn(generation=command.generation)
                return [*dropped, Report(report=self.outcome)]
            case Go() | Query():
                unknown = Unready(generation=command.generation, why="nothing was asked of this rank yet")
                return [*dropped, Report(report=unknown)]
            case _:
                return dropped

    def _drop(self, why: str) -> list[RankAction]:
        match self.half:
            case Stayer() if self.half.generation:
                self.floor = max(self.floor, self.half.generation)
                self.half, actions = stayer.abort(self.half)
                return actions
            case Leaver():
                half, actions = leaver.abort(self.half)
                self._now(half, actions)
                return actions
        return []

    def _answer_old(self, command: SwitchCommand) -> list[RankAction]:
        if isinstance(command, Abort | Planned):
            return []
        known = self.outcome
        if known is not None and getattr(known, "generation", 0) == command.generation:
            return [Report(report=known)]
        if isinstance(command, Withdraw):
            return [Report(report=Withdrawn(generation=command.generation))]
        over = f"found generation {command.generation}, expected one above {self.floor}: it is over for this rank"
        return [Report(report=Unready(generation=command.generation, why=over))]

    def _obey_as_stayer(self, half: Stayer, command: SwitchCommand) -> list[RankAction]:
        match command:
            case PrepareStayer() if not self._is_bound():
                self.half, actions = stayer.prepare(half, command)
                return actions
            case Abort() if not self._is_bound():
                after, actions = stayer.abort(half)
                self._now(after)
                return actions
            case Query() if half.state is StayerState.UNREADY:
                return [Report(report=Unready(generation=half.generation, why=half.why))]
            case Query() if half.state is not StayerState.PREPARING:
                return [stayer.ready(half)]
            case _:
                return []

    def _obey_as_leaver(self, half: Leaver, command: SwitchCommand) -> list[RankAction]:
        decided = half.state is LeaverState.LEFT
        if half.at_boundary and (decided or not half.is_lead or not isinstance(command, Withdraw)):
            return leaver.standing(half) if half.is_lead and not isinstance(command, Planned | Abort) else []
        match command:
            case PrepareLeaver():
                after, actions = leaver.repeat(half)
            case Go() if half.is_lead:
                after, actions = leaver.go(half)
            case Withdraw() if half.is_lead:
                after, actions = leaver.withdraw(half)
            case Planned(stayers=stayers):
                after, actions = leaver.planned(half, frozenset(stayers))
            case Abort() if half.state in (LeaverState.LISTENING, LeaverState.READY, LeaverState.UNREADY):
                after, actions = leaver.abort(half)
            case Query():
                after, actions = half, leaver.standing(half)
            case _:
                return []
        self._now(after, actions)
        return actions

    def _obey_as_joiner(self, half: Joiner, command: SwitchCommand) -> list[RankAction]:
        live = half.state in (JoinerState.LIVE, JoinerState.SETTLED)
        if command.generation < half.generation:
            return []
        match command:
            case PrepareJoiner() if half.state in (JoinerState.BUILT, JoinerState.READY):
                self.half, actions = joiner.prepare(half, command)
                return actions
            case Abort() if not live:
                self.half, actions = joiner.abort(half, command.why)
                return actions
            case Resolve() if half.state in (JoinerState.WHOLE, JoinerState.DOUBT, JoinerState.LIVE):
                self.half, actions = joiner.resolve(half)
                return actions
            case Query():
                return joiner.standing(half)
            case _:
                return []

    def _take_up_deferred(self) -> list[RankAction]:
        actions: list[RankAction] = []
        if self._directory is not None:
            actions += self._hear_directory(self._directory)
        while self._deferred and not self._is_bound():
            actions += self._obey_in_switch(self._deferred.popleft())
        return actions
