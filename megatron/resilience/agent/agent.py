"""The agent of one machine: carries out what its core decides. One event loop; no torch, no decision of its own.

It stands between the launcher (or Slurm) and spawners: ranks are started when the controller says so, their output
goes where the agent's goes, their failures are told to the launcher if they are the job's. A leaver's ranks that were
released, and a joiner's that never came to train, are not. (Paper section 3; architecture, control plane.)
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace

from megatron.resilience.agent import events, process_tree
from megatron.resilience.agent.agent_config import AgentConfig, spawner_command
from megatron.resilience.agent.alone import AloneWatch
from megatron.resilience.agent.controller_line import ControllerLine, LineCallbacks
from megatron.resilience.agent.environment import inherited_environment, joining_environment
from megatron.resilience.agent.failure import EXIT_FAILURE, EXIT_OK, FailureReport, cause, describe, first_failure
from megatron.resilience.agent.output import LineSink
from megatron.resilience.agent.rank_socket import RankSocket
from megatron.resilience.agent.signals import STOP_SIGNALS, is_ignored
from megatron.resilience.agent.spawner_child import SpawnerChild
from megatron.resilience.protocol.agent_core import (
    AgentAction,
    AgentCore,
    AgentEvent,
    Connected,
    ControllerSaid,
    Disconnected,
    EndRank,
    Hang,
    ProcessEnded,
    RankSaid,
    SayToController,
    SayToRank,
    Spawn,
)
from megatron.resilience.protocol.messages import (
    Directory,
    Discard,
    Left,
    RankReport,
    Running,
    StartRanks,
    StopJob,
    ToAgent,
    Welcome,
)

RELEASE_S = 30.0
"""From the word that a slot has moved until its ranks are ended."""
ORPHANED_S = 30.0
"""From a failure of the machine's own ranks until the agent ends without the controller's word."""
_LAST_WORDS_S = 1.0


class Agent:
    """See the module. The calling process must be a child subreaper."""

    def __init__(self, config: AgentConfig, core: AgentCore) -> None:
        self._config = config
        self._core = core
        self._sink = LineSink(sys.stdout.fileno())
        self._children: dict[int, SpawnerChild] = {}
        self._holding: set[int] = set()
        """Generations whose ranks hold a slot of the job."""
        self._failures: list[FailureReport] = []
        self._untold: dict[int, list[FailureReport]] = {}
        """Generation -> failures of its ranks, which did not train yet: the job's, unless their switch is undone."""
        self._code = EXIT_OK
        self._has_met = False
        """Whether a controller has ever let it in."""
        self._hung_why = ""
        """Why it last left a controller, or was turned away."""
        self._stop_signal = 0
        self._over = asyncio.Event()
        self._socket = RankSocket(token=config.line.token, is_ours=self._is_ours, heard=self._on_report, say=self._say)
        self._alone = AloneWatch(config.alone_s, self._on_alone)
        callbacks = LineCallbacks(
            connected=lambda: self._step(Connected()),
            said=self._on_controller,
            disconnected=self._on_disconnected,
            refused=self._on_refused,
            away=self._on_away,
        )
        self._line = ControllerLine(config.line, callbacks)

    async def run(self) -> int:
        """Runs until the job is over here. Returns the exit code; nothing of the ranks is left."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._on_children)
        for number in STOP_SIGNALS:
            if not is_ignored(number):
                loop.add_signal_handler(number, self._on_stop, number)
        if self._config.report_fd is not None:
            loop.add_reader(self._config.report_fd, self._on_launcher_gone)
        loop.call_later(self._config.first_contact_s, self._on_first_contact_late)
        await self._socket.start()
        line = asyncio.ensure_future(self._line.run())
        line.add_done_callback(self._on_line_done)
        try:
            await self._over.wait()
            # What was said last has to reach the controller: a rank's end may be the end of the job.
            self._line.hang(for_good=True)
            await asyncio.wait([line], timeout=_LAST_WORDS_S)
        finally:
            line.cancel()
            self._socket.stop()
            for child in self._children.values():
                child.close()
            process_tree.end_processes(lambda: process_tree.descendants(process_tree.read_processes(), os.getpid()))
            process_tree.reap_children()
        return self._conclude()

    # ------------------------------------------------------------------ events

    def _is_ours(self, global_rank: int, generation: int) -> bool:
        held = self._core.processes.get(global_rank)
        return held is not None and held.generation == generation

    def _on_controller(self, message: ToAgent) -> None:
        if isinstance(message, Welcome | StopJob):
            self._has_met = True
            self._alone.met()
        was_stopped = bool(self._core.stopped)
        kills_at_once = isinstance(message, Discard)
        if isinstance(message, Discard):
            self._untold.pop(message.generation, None)
        self._step(ControllerSaid(message=message), end_s=0.0 if kills_at_once else self._config.limits.settle_s)
        if isinstance(message, StopJob) and not was_stopped and self._core.stopped:
            if not message.ok:
                self._tell_untold()
            self._tell(events.JobStopped(why=message.why))
        self._end_if_done()

    def _on_disconnected(self) -> None:
        self._step(Disconnected())
        if self._has_met:
            self._alone.lost()

    def _on_alone(self) -> None:
        """Training needs no controller; without ranks there is nothing to wait for but one."""
        if self._children:
            return
        where, limit_s = self._config.line.where, self._config.alone_s
        words = f"no controller at {where} has let this agent in for {limit_s:g} s, and no rank runs here"
        if self._core.started:
            self._say(f"ends: {words}")
            self._over.set()
        else:
            self._fail(f"{words}; start it again if the job still runs")

    def _on_report(self, global_rank: int, generation: int, report: RankReport) -> None:
        child = self._children.get(generation)
        if isinstance(report, Running) and generation not in self._holding and child is not None:
            self._holding.add(generation)
            self._tell(events.SlotTaken(group_rank=child.slot))
        if isinstance(report, Left) and child is not None:
            self._release(child)
        self._step(RankSaid(global_rank=global_rank, generation=generation, report=report))

    def _on_refused(self, why: str) -> None:
        if self._has_met or self._children:
            return  # it was let in before: whoever refuses now is no reason to end training
        self._fail(f"the controller at {self._config.line.where} refuses this agent: {why}")

    def _on_away(self, why: str) -> None:
        if self._config.report_fd is None and not self._has_met:
            self._say(f"no controller at {self._config.line.where} yet: {why}")

    def _on_first_contact_late(self) -> None:
        if not self._has_met:
            was_found = f"was turned away: {self._hung_why}"
            none = f"found no controller at {self._config.line.where}, expected one; start it, or correct "
            none += "TRAINMOVER_CONTROLLER"
            self._fail(f"in {self._config.first_contact_s:g} s {was_found if self._hung_why else none}")

    def _on_line_done(self, line: asyncio.Future[None]) -> None:
        if not line.cancelled() and (error := line.exception()) is not None:
            raise error  # a defect: to the loop's handler, with its traceback; ranks go on
        if not self._children and not self._over.is_set():
            self._fail(f"the controller has turned this agent away: {self._hung_why}")

    def _on_launcher_gone(self) -> None:
        assert self._config.report_fd is not None
        asyncio.get_running_loop().remove_reader(self._config.report_fd)
        self._core.stopped = self._core.stopped or "the launcher has gone"
        for child in self._children.values():
            self._end_child(child)
        self._end_if_done()

    def _on_stop(self, number: int) -> None:
        self._stop_signal = number
        for child in self._children.values():
            child.send(signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM)
        self._end_if_done()

    def _on_children(self) -> None:
        for pid, status in process_tree.reap_children():
            child = next((one for one in self._children.values() if one.pid == pid), None)
            if child is not None:
                self._on_spawner_ended(child, status)

    # ------------------------------------------------------------------ spawners

    def _spawn(self, start: StartRanks) -> None:
        child = SpawnerChild(generation=start.generation, slot=start.slot, ranks=start.ranks)
        command = spawner_command(
            self._config, machine_id=self._core.machine_id, slot=start.slot, generation=start.generation
        )
        joining = joining_environment(socket_path=self._socket.path, generation=start.generation)
        try:
            child.start(command, {**inherited_environment(), **joining})
        except OSError as error:
            child.close()
            self._on_not_started(start, f"its spawner cannot be started: {error}")
            return
        self._children[start.generation] = child
        asyncio.get_running_loop().add_reader(child.channel, self._on_events, child)
        if start.generation == 1:
            self._holding.add(1)
            self._tell(events.SlotTaken(group_rank=start.slot))
            return
        self._say(f"starts global ranks {list(start.ranks)} of slot {start.slot} for generation {start.generation}")
        directory = Directory(endpoints=start.endpoints, slot_generations=start.slot_generations)
        for global_rank in start.ranks:
            self._socket.send(global_rank, directory)

    def _on_not_started(self, start: StartRanks, why: str) -> None:
        """No process, no descriptor, no memory: its ranks end before they have begun."""
        if start.generation == 1:  # they were the job's
            self._code = EXIT_FAILURE
            self._tell(events.SlotTaken(group_rank=start.slot))
            asyncio.get_running_loop().call_later(ORPHANED_S, self._over.set)
        self._say(f"global ranks {list(start.ranks)} of generation {start.generation}: {why}")
        for global_rank in start.ranks:
            ended = ProcessEnded(global_rank=global_rank, generation=start.generation, exit_code=EXIT_FAILURE, why=why)
            self._step(ended)

    def _on_events(self, child: SpawnerChild) -> None:
        news, has_more = child.read_events()
        if not has_more:
            asyncio.get_running_loop().remove_reader(child.channel)
        self._take(child, news)

    def _take(self, child: SpawnerChild, news: list[events.AgentEvent]) -> None:
        for event in news:
            self._pass_on(child, event)
            if isinstance(event, events.RankExited):
                self._end_rank(child, event.global_rank, event.status, event.failure)

    def _counts(self, child: SpawnerChild) -> bool:
        """Whether its ranks are the job's."""
        return child.generation in self._holding

    def _pass_on(self, child: SpawnerChild, event: events.AgentEvent) -> None:
        if self._counts(child) or isinstance(event, events.RankStarted):
            self._tell(event)
            if isinstance(event, events.RankFailed | events.RankExited) and event.failure is not None:
                child.has_failed = True
                self._failures.append(event.failure)
        elif isinstance(event, events.RankFailed | events.RankExited) and event.failure is not None:
            if not child.is_ordered_to_end:
                self._untold.setdefault(child.generation, []).append(event.failure)
            if isinstance(event, events.RankFailed):
                what = event.failure.exception or "it failed"
                self._say(f"global rank {event.failure.global_rank} of generation {child.generation}: {what}")

    def _tell_untold(self) -> None:
        """The job is over, and these switches were not undone: past the point of no return such a rank is the job's."""
        for generation, failures in self._untold.items():
            advice = (
                f"it was to train from generation {generation} on, whose point of no return had passed; start the job "
                "again from its newest checkpoint"
            )
            for failure in failures:
                told = replace(failure, advice=advice)
                self._failures.append(told)
                self._tell(events.RankFailed(failure=told))
            self._code = EXIT_FAILURE

    def _end_rank(self, child: SpawnerChild, global_rank: int, status: int, failure: FailureReport | None) -> None:
        child.living.discard(global_rank)
        self._socket.forget(global_rank)
        why = "" if failure is None else cause(failure)
        ended = ProcessEnded(global_rank=global_rank, generation=child.generation, exit_code=status, why=why)
        self._step(ended)

    def _on_spawner_ended(self, child: SpawnerChild, status: int) -> None:
        """It was reaped: what it told is complete, and what it left is now beneath us."""
        self._read_rest(child)
        child.end(status)
        child.close()
        spared = [one.pid for one in self._children.values() if one is not child]
        process_tree.end_processes(
            lambda: process_tree.descendants(process_tree.read_processes(), os.getpid(), spared=spared)
        )
        for global_rank in sorted(child.living):
            self._end_rank(child, global_rank, status or EXIT_FAILURE, None)
        del self._children[child.generation]
        if self._counts(child):
            self._code = status if status >= 0 else EXIT_FAILURE
        elif status and not child.is_ordered_to_end:
            self._say(f"the ranks of generation {child.generation} ended with code {status} before they trained")
        if child.has_failed or (status and self._counts(child)):
            asyncio.get_running_loop().call_later(ORPHANED_S, self._over.set)
        self._end_if_done()

    def _read_rest(self, child: SpawnerChild) -> None:
        asyncio.get_running_loop().remove_reader(child.channel)
        has_more = True
        while has_more:
            news, has_more = child.read_events()
            self._take(child, news)
            has_more = has_more and bool(news)

    def _end_child(self, child: SpawnerChild) -> None:
        """Ends it and its ranks, whatever they do."""
        if not child.is_ordered_to_end and child.generation in self._children:
            child.order_end()
            limits = self._config.limits
            asyncio.get_running_loop().call_later(2 * limits.kill_s, self._kill_child, child)

    def _kill_child(self, child: SpawnerChild) -> None:
        if self._children.get(child.generation) is child:
            child.kill()

    # ------------------------------------------------------------------ actions

    def _step(self, event: AgentEvent, *, end_s: float = 0.0) -> None:
        for action in self._core.step(event):
            self._carry_out(action, end_s)

    def _carry_out(self, action: AgentAction, end_s: float) -> None:
        match action:
            case SayToController(message=message):
                self._line.say(message)
            case SayToRank(global_rank=global_rank, command=command):
                self._socket.send(global_rank, command)
            case Spawn(start=start):
                self._spawn(start)
            case EndRank(generation=generation, gently=gently):
                self._end_by(generation, RELEASE_S if gently else end_s, is_release=gently)
            case Hang(why=why, for_good=for_good):
                if why != self._hung_why:
                    self._say(f"leaves its controller{'' if for_good else ', and asks again'}: {why}")
                self._hung_why = why
                self._line.hang(for_good=for_good)

    def _end_by(self, generation: int, within_s: float, *, is_release: bool) -> None:
        child = self._children.get(generation)
        if child is None:
            return
        if is_release:
            self._release(child)
        asyncio.get_running_loop().call_later(within_s, self._end_child, child)

    def _release(self, child: SpawnerChild) -> None:
        """What becomes of its ranks concerns the job no more."""
        if child.generation in self._holding:
            self._holding.discard(child.generation)
            self._tell(events.SlotReleased(group_rank=child.slot))

    def _end_if_done(self) -> None:
        if not self._children and (self._core.stopped or self._stop_signal):
            self._over.set()

    def _fail(self, why: str) -> None:
        print(f"trainmover: error: machine {self._core.machine_id}: {why}", file=sys.stderr, flush=True)
        self._code = EXIT_FAILURE
        self._over.set()

    def _say(self, text: str) -> None:
        # The launcher puts the machine before each line itself.
        self._sink.write([text if self._config.report_fd is not None else f"{self._core.machine_id}: {text}"])

    def _tell(self, event: events.AgentEvent) -> None:
        if self._config.report_fd is None:
            return
        data = events.encode(event)
        try:
            while data:
                data = data[os.write(self._config.report_fd, data) :]
        except (BrokenPipeError, ConnectionError):
            return  # the loop sees the same and acts on it

    def _conclude(self) -> int:
        verdict = first_failure(self._failures)
        if verdict is not None and self._config.report_fd is None:
            LineSink(sys.stderr.fileno()).write(describe(verdict))
        return self._code
