"""A rank's part in switches, from its own side: the shell round `protocol.rank_core`.

Everything happens on the training thread, at two places of an iteration: `vote` just before the optimizer step and
`reach_boundary` at the top of the loop. Between them only queues fill. A joiner calls `join` once, before its loop.

One thing may come at any time, on the thread of the line to the agent: that a rank has moved (`hear`). A rank that
waits in a collective for its first connection to it would wait for a dead one else.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import trainmover_ext
from megatron.resilience.protocol import messages, switch
from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.rank_core import RankCore
from megatron.resilience.protocol.vote import Contribution, Decision, boundary_of, decide
from megatron.resilience.state.transfer import TransferIdentity
from megatron.resilience.worker.costs import Costs
from megatron.resilience.worker.endpoints import join_by, make_known
from megatron.resilience.worker.errors import SlotMoved, SwitchFailedError, not_released
from megatron.resilience.worker.handover import Handover
from megatron.resilience.worker.limits import SwitchLimits
from megatron.resilience.worker.memory import look
from megatron.resilience.worker.transfers import Events, JoinerTransfer, LeaverTransfer
from trainmover_ext.switching import SwitchPhase

_IDLE_WAIT_S = 0.02
_BUSY_WAIT_S = 0.001
_PROGRESS_S = 1.0


class Agent(Protocol):
    """The rank's line to its agent: `agent_link.AgentLink`."""

    def send(self, report: messages.RankReport) -> None:
        """Queues a report; never blocks."""

    def take(self) -> list[messages.RankCommand]:
        """Commands that have come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who this rank is. `generation`: the switch it was started for, or None. `counts_tensors`: see `memory.look`."""

    global_rank: int
    job: str
    token: str
    bind_address: str
    generation: int | None = None
    counts_tensors: bool = False


class RankWorker:
    """See the module. `all_reduce` forms the MAX of a vote over all ranks of the job."""

    def __init__(
        self,
        place: Place,
        agent: Agent,
        *,
        inventory: Any,
        handover: Handover,
        all_reduce: Callable[[Contribution], Contribution],
        limits: SwitchLimits | None = None,
    ) -> None:
        self._place = place
        self._agent = agent
        self._inventory = inventory
        self._handover = handover
        self._all_reduce = all_reduce
        self._limits = limits or SwitchLimits()
        self._core = RankCore(place.global_rank, generation=place.generation)
        self._lock = threading.RLock()
        """Of the core and of what it asks for: `hear` comes in between."""
        memory = look(inventory, counts_tensors=place.counts_tensors)
        self._costs = Costs(memory, handover.meter, is_new=place.generation is not None)
        self._joined_now = False
        self._events: Events = queue.SimpleQueue()
        self._deadline: tuple[int, float] | None = None
        self._watched: tuple[int, SwitchPhase] | None = None
        self._prepared: tuple[int, dict[int, str]] | None = None
        self._transfer: LeaverTransfer | JoinerTransfer | None = None
        self._unplanned = ""
        self._directory: messages.Directory | None = None
        self._joiners: dict[int, str] = {}
        self._next_progress_s = 0.0

    # ------------------------------------------------------------------ called by the loop

    def start(self, facts: Facts) -> None:
        """A rank of the first start, when all is built: tells where it listens."""
        self._hello(facts)
        endpoint, memory_bytes = trainmover_ext.endpoint(), self._memory_bytes()
        self._agent.send(messages.Built(generation=1, endpoint=endpoint, facts=facts, memory_bytes=memory_bytes))

    def _hello(self, facts: Facts) -> None:
        generation = self._place.generation or 1
        self._agent.send(messages.WorkerHello(generation=generation, endpoint=trainmover_ext.endpoint(), facts=facts))

    def vote(self, iteration: int, *, obstacles: tuple[str, ...], exits: int) -> Contribution:
        """The vote of `iteration`, the same result on all ranks. Collective; just before the optimizer step."""
        self._listen()
        with self._lock:
            actions = self._core.step(switch.VoteOpened(iteration=iteration, obstacles=obstacles, exits=exits))
        own = next(action.contribution for action in actions if isinstance(action, switch.Contribute))
        self._carry_out([action for action in actions if not isinstance(action, switch.Contribute)])
        result = self._all_reduce(own)
        if decide(result) is Decision.SWITCH:
            self._costs.granted(result.cast, boundary_of(iteration))
        self._feed(switch.VoteClosed(iteration=iteration, result=result))
        return result

    def reach_boundary(self, iteration: int) -> None:
        """The top of the loop. Returns when this rank may train `iteration`.

        Raises SlotMoved when it must not any more, SwitchFailedError when the job cannot go on.
        """
        if self._joined_now:
            self._costs.granted(self._place.generation or 0, iteration)
            self._joined_now = False
        measured = self._costs.arrive(iteration, 0 if self._transfer is None else self._transfer.bytes_moved)
        if measured is not None:
            self._agent.send(measured)
            if self._transfer is not None and self._transfer.generation == measured.generation:
                self.close()
        self._report_progress(iteration)
        self._listen(at_links=False)  # they are looked at in each vote, and while it waits
        self._feed(switch.BoundaryReached(iteration=iteration))
        self._wait()

    def hear(self, command: messages.RankCommand) -> bool:
        """From the line's thread: takes `command` if it need not wait for the loop; returns whether it has."""
        if not isinstance(command, messages.Directory):
            return False
        with self._lock:
            if not self._core.is_member:
                return False
            try:
                self._feed(switch.CommandCame(command=command))
            except Exception:  # noqa: BLE001 - it is said again in the loop, where it ends the rank
                return False
        return True

    def join(self, facts: Facts) -> None:
        """A joiner, when all is built: takes the state, and returns when it may train as the rank it stands for.

        Raises SlotMoved when the switch that it was started for is off.
        """
        generation = self._place.generation
        if generation is None:
            raise ValueError("found a rank of the first start, expected one that was started for a switch")
        self._hello(facts)
        limit_s = self._limits.of(switch.Wait.DOUBT)
        deadline_s = time.monotonic() + limit_s
        while self._directory is None:
            if time.monotonic() > deadline_s:
                raise SwitchFailedError(f"the agent told no endpoints within {limit_s:g} s; look at its log")
            self._listen()
            time.sleep(_IDLE_WAIT_S)
        self._feed(
            switch.BuildFinished(endpoint=trainmover_ext.endpoint(), facts=facts, memory_bytes=self._memory_bytes())
        )
        self._wait()

    def close(self) -> None:
        """Ends what a switch under way has open."""
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None

    # ------------------------------------------------------------------ events in

    def _wait(self) -> None:
        while self._core.is_waiting:
            self._listen()
            self._take_note()
            if trainmover_ext.aborted():
                raise SwitchFailedError(
                    f"CollectiveAborted: a rank was lost while global rank {self._place.global_rank} stood at the "
                    f"boundary of generation {self._core.switch_generation}; start the job again from its newest "
                    "checkpoint"
                )
            if self._deadline is not None and time.monotonic() > self._deadline[1]:
                generation, self._deadline = self._deadline[0], None
                self._feed(switch.WaitedTooLong(generation=generation))
                if isinstance(self._transfer, LeaverTransfer) and not self._core.is_member:
                    self.close()
                    raise SlotMoved(not_released(generation, self._limits.release_s))
        self._deadline = None

    def _listen(self, *, at_links: bool = True) -> None:
        """Commands, links that came up, links prepared, and what the transfer says."""
        for command in self._agent.take():
            if isinstance(command, messages.PrepareStayer | messages.PrepareLeaver):
                self._costs.announce(time.monotonic() - command.since_ms / 1e3)
            self._feed(switch.CommandCame(command=command))
        if at_links and (self._place.generation is None or self._core.is_member):  # none while it is isolated
            for peer in trainmover_ext.linked_ranks():
                if peer not in self._core.links:
                    self._feed(switch.LinkAppeared(peer=peer))
        self._look_at_prepared()
        if at_links and isinstance(self._transfer, LeaverTransfer):
            self._transfer.tend()
        while not self._events.empty():
            self._feed(self._events.get_nowait())

    def _look_at_prepared(self) -> None:
        """Prepared links, until they are committed or dropped: one that breaks withdraws READY (rule P2)."""
        if self._watched is None:
            return
        generation, known = self._watched
        state = trainmover_ext.switch_state(generation)
        if state.phase is known:
            return
        self._watched = (generation, state.phase)
        if state.phase is SwitchPhase.READY:
            self._feed(switch.LinksPrepared(generation=generation))
        elif state.phase is SwitchPhase.BROKEN:
            self._feed(switch.LinkBroke(generation=generation, why=state.reason))

    def _take_note(self) -> None:
        is_stayer_waiting = self._transfer is None
        if self._place.generation is not None and not self._core.is_member:
            time.sleep(_BUSY_WAIT_S)  # isolated: nobody sends notes here
            return
        note = trainmover_ext.receive_note(_IDLE_WAIT_S if is_stayer_waiting else _BUSY_WAIT_S)
        if note is not None:
            self._feed(switch.NoteCame(sender=note.peer, note=_decode_note(note.payload)))

    def _feed(self, event: switch.RankEvent) -> None:
        with self._lock:
            self._carry_out(self._core.step(event))

    # ------------------------------------------------------------------ actions out

    def _carry_out(self, actions: list[switch.RankAction]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: switch.RankAction) -> None:
        match action:
            case switch.Report(report=report):
                self._agent.send(report)
            case switch.SendNote(peer=peer, note=note):
                trainmover_ext.send_note(peer, note.generation, messages.encode(note))
            case switch.StartWait(generation=generation, wait=wait):
                self._deadline = (generation, time.monotonic() + self._limits.of(wait))
            case switch.UpdateDirectory(directory=directory):
                self._learn(directory)
            case switch.Fail(why=why):
                raise SwitchFailedError(why)
            case switch.EndProcess(why=why):
                self.close()
                raise SlotMoved(why)
            case switch.PrepareLinks() | switch.CommitLinks() | switch.AbortLinks() | switch.HoldNewLinks():
                self._do_with_links(action)
            case _:
                self._do_with_transfer(action)

    def _do_with_links(self, action: Any) -> None:
        generation = action.generation
        match action:
            case switch.PrepareLinks(joiners=joiners):
                self._prepare_links(generation, dict(joiners))
            case switch.CommitLinks():
                with self._costs.phase("commit"):
                    tally = trainmover_ext.commit_switch(generation)
                self._watched = None
                self._costs.links = (tally.links.kept, tally.links.replaced)
            case switch.AbortLinks():
                trainmover_ext.abort_switch(generation)
                self._watched = None
                self._drop()
            case switch.HoldNewLinks(hold=True):
                with self._costs.phase("hold"):
                    self._hold(generation)
            case switch.HoldNewLinks():
                trainmover_ext.abort_switch(generation)
                self._drop()

    def _prepare_links(self, generation: int, joiners: dict[int, str]) -> None:
        """Once a generation: a link that comes up later is dropped at the commit, and connects when it is used next."""
        if self._prepared == (generation, joiners):
            if self._watched is not None:
                self._watched = (generation, SwitchPhase.PENDING)  # what it is by now is said again
            return
        self._costs.begin()
        try:
            trainmover_ext.prepare_switch(generation, joiners)
        except (trainmover_ext.CollectiveError, ValueError) as error:
            self._costs.drop()
            self._events.put(switch.LinkBroke(generation=generation, why=str(error)))
            return
        self._prepared = (generation, joiners)
        self._watched = (generation, SwitchPhase.PENDING)

    def _hold(self, generation: int) -> None:
        """Raises nothing: what does not hold makes the verdict STAY."""
        try:
            held = trainmover_ext.hold_links(generation)
        except trainmover_ext.CollectiveError as error:
            self._unplanned = str(error)
            return
        half = self._core.half
        unplanned = sorted(set(held) - getattr(half, "planned", set()) - getattr(half, "leavers", set()))
        self._unplanned = f"links to global ranks {unplanned} came up after the vote" if unplanned else ""
        self._handover.text = trainmover_ext.handover()

    def _do_with_transfer(self, action: Any) -> None:
        generation = action.generation
        match action:
            case switch.ListenForTransfer():
                self._costs.begin()
                self._listen_for_transfer(generation)
            case switch.SendState() if self._unplanned:
                self._events.put(switch.TransferFailed(generation=generation, why=self._unplanned))
            case switch.SendState():
                self._leaver_transfer().send()
            case switch.SendVerdict(leave=leave):
                self._leaver_transfer().tell(leave=leave)
                if leave:
                    self._deadline = (generation, time.monotonic() + self._limits.release_s)
                    trainmover_ext.leave_switch(generation)
                else:
                    self._drop()
            case switch.CloseTransfer():
                trainmover_ext.abort_switch(generation)
                self._drop()
            case switch.FetchState(address=address, joiners=joiners):
                self.close()
                self._joiners = dict(joiners)
                identity = self._identity(generation)
                self._transfer = JoinerTransfer(identity, address, self._inventory, self._events)
            case switch.GoLive():
                self._go_live(generation)

    def _listen_for_transfer(self, generation: int) -> None:
        self.close()
        limit_s = self._limits.of_state(self._inventory.total_bytes)
        transfer = LeaverTransfer(self._identity(generation), self._inventory, self._events, transfer_s=limit_s)
        self._transfer = transfer
        try:
            address = transfer.listen(self._place.bind_address)
        except OSError as error:
            self._events.put(switch.LinkBroke(generation=generation, why=f"no address to give state at: {error}"))
            return
        self._events.put(switch.TransferListening(generation=generation, address=address))

    def _leaver_transfer(self) -> LeaverTransfer:
        if not isinstance(self._transfer, LeaverTransfer):
            raise SwitchFailedError("found no transfer that listens, expected one since PREPARE; this is a defect")
        return self._transfer

    def _identity(self, generation: int) -> TransferIdentity:
        place = self._place
        return TransferIdentity(
            job_id=place.job, token=place.token, generation=generation, global_rank=place.global_rank
        )

    def _go_live(self, generation: int) -> None:
        others = {rank: text for rank, text in self._joiners.items() if rank != self._place.global_rank}
        trainmover_ext.go_live(generation, self._handover.text, others)
        self._joined_now = True

    def _learn(self, directory: messages.Directory) -> None:
        """Endpoints of all, by the generation in which their slots last changed hands."""
        is_first = self._directory is None
        self._directory = directory
        if self._place.generation is not None and is_first:
            join_by(directory, self._place.generation)
        else:
            make_known(directory, self._place.global_rank)

    # ------------------------------------------------------------------ what it costs

    def _drop(self) -> None:
        self.close()
        self._costs.drop()

    def _memory_bytes(self) -> int:
        return sum(trainmover_ext.memory_stats().values()) + int(self._inventory.total_bytes)

    def _report_progress(self, iteration: int) -> None:
        if time.monotonic() < self._next_progress_s:
            return
        self._next_progress_s = time.monotonic() + _PROGRESS_S
        median_ms = self._costs.median_iteration_ms()
        self._agent.send(messages.Progress(iteration=iteration, median_iteration_ms=median_ms))


def _decode_note(payload: bytes) -> Any:
    return messages.decode(payload, sender=messages.Party.RANK, receiver=messages.Party.PEER)
