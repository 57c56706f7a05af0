"""A whole job on one computer: one spawner a machine, their merged log, and one end for all of them.

Made by `trainmover run`. It holds a socket to each spawner: events come in, and closing our side tells the spawner to
kill its ranks, which is also what happens if this process dies. If a spawner dies, its orphans become our children.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron.resilience.agent import events, lifecycle, process_tree
from megatron.resilience.agent.environment import JobShape, default_environment, inherited_environment
from megatron.resilience.agent.failure import FailureReport, describe, exit_code, first_failure, last_words
from megatron.resilience.agent.lifecycle import Event, Limits, State
from megatron.resilience.agent.log_merge import WarningFolder, parse_prefix
from megatron.resilience.agent.output import LineSink
from megatron.resilience.agent.progress import Progress, parse_training_line, summarize
from megatron.resilience.agent.rank_start import StartMode
from megatron.resilience.agent.shared_memory import SharedMemoryWatch
from megatron.resilience.agent.signals import SignalInbox
from megatron.resilience.cli.machine import Machine
from megatron.resilience.cli.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """What to run."""

    shape: JobShape
    script: str
    arguments: tuple[str, ...]
    start: StartMode
    log_dir: Path
    limits: Limits


def spawner_command(config: JobConfig, group_rank: int, report_fd: int) -> list[str]:
    """The command line of one machine's spawner."""
    return [
        *(sys.executable, "-m", "megatron.resilience.agent.spawner"),
        *("--machine", str(group_rank), "--machines", str(config.shape.machines)),
        *("--ranks-per-machine", str(config.shape.ranks_per_machine)),
        *("--master-addr", config.shape.master_addr, "--master-port", str(config.shape.master_port)),
        *("--log-dir", str(config.log_dir), "--start", config.start.value),
        *("--grace-period", str(config.limits.grace_s), "--report-fd", str(report_fd)),
        *("--", config.script, *config.arguments),
    ]


class Job:
    """The launcher's loop. The calling process must be a child subreaper."""

    _process_name = "spawner"
    """What a machine is to the launcher."""

    def __init__(self, config: JobConfig, view: View) -> None:
        self._config = config
        self._view = view
        self._signals = SignalInbox()
        self._selector = selectors.DefaultSelector()
        self._memory = SharedMemoryWatch()
        self._machines: dict[int, Machine] = {}
        self._state = State.RUNNING
        self._deadline_s = float("inf")
        self._stop_signals: list[int] = []
        self._failures: dict[tuple[int, int | None], FailureReport] = {}
        self._statuses: dict[int, int] = {}
        self._folder = WarningFolder()
        self._progress = Progress()

    def run(self) -> int:
        """Runs the job to its end. Returns the exit code; nothing of the job is left, however it ends."""
        started_s = time.monotonic()
        self._signals.open()
        self._selector.register(self._signals, selectors.EVENT_READ)
        shape = self._config.shape
        self._say(
            f"{shape.machines} machine{'s' * (shape.machines > 1)} of {shape.ranks_per_machine}, rank 0 at"
            f" {shape.master_addr}:{shape.master_port}, logs in {self._config.log_dir}"
        )
        try:
            self._start_machines()
            while self._state is not State.ENDED:
                self._turn()
        finally:
            self._sweep()
            self._view.close()
        return self._conclude(time.monotonic() - started_s)

    def _start_machines(self) -> None:
        inherited = inherited_environment()
        environment = {**inherited, **default_environment(inherited, self._config.shape.master_addr)}
        for group_rank in range(self._config.shape.machines):
            self._start_machine(group_rank, partial(spawner_command, self._config, group_rank), environment)

    def _start_machine(
        self, group_rank: int, command: Callable[[int], list[str]], environment: Mapping[str, str]
    ) -> Machine:
        """Starts `command(report descriptor)`, which is to be a machine's spawner or agent."""
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            command(theirs.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        machine = Machine(group_rank, process, ours)
        self._machines[process.pid] = machine
        self._selector.register(machine.output, selectors.EVENT_READ, machine)
        self._selector.register(machine.channel, selectors.EVENT_READ, machine)
        return machine

    def _next_deadline_s(self) -> float:
        return self._deadline_s

    def _turn(self) -> None:
        deadline_s = self._next_deadline_s()
        timeout_s = None if deadline_s == float("inf") else max(0.0, deadline_s - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                for number in self._signals.read():
                    self._on_signal(number)
            elif not key.data.is_ended:
                self._read(key.data)
        if all(machine.is_ended for machine in self._machines.values()):
            self._step(Event.ALL_ENDED)
        elif time.monotonic() >= self._deadline_s:
            self._step(Event.DEADLINE_PASSED)

    def _step(self, event: Event) -> None:
        before, self._state = self._state, lifecycle.transition(self._state, event)
        if self._state is before:
            return
        limit_s = self._config.limits.of(self._state)
        self._deadline_s = float("inf") if limit_s is None else time.monotonic() + limit_s
        if self._state is State.KILLING:
            for machine in self._machines.values():
                machine.order_kill()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            for pid, status in process_tree.reap_children():
                self._on_child_ended(pid, status)
            return
        is_stop = number in (signal.SIGINT, signal.SIGTERM)
        if is_stop and any(sent in self._stop_signals for sent in (signal.SIGINT, signal.SIGTERM)):
            self._step(Event.KILL_REQUESTED)
            return
        self._stop_signals.append(number)
        forwarded = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
        self._say(
            f"{signal.Signals(number).name}: stopping; the ranks have {self._config.limits.grace_s:g} s,"
            " a second one ends them at once"
        )
        for machine in self._machines.values():
            machine.send(forwarded)
        self._step(Event.STOP_REQUESTED)

    def _on_child_ended(self, pid: int, status: int) -> None:
        if pid in self._machines:
            self._on_machine_ended(self._machines[pid], status)

    def _read(self, machine: Machine) -> None:
        self._show(machine, machine.read_lines())
        for event in machine.read_events():
            self._learn(machine, event)
        for stream in machine.take_finished_streams():
            self._selector.unregister(stream)

    def _learn(self, machine: Machine, event: events.AgentEvent) -> None:
        match event:
            case events.RankStarted(pid=pid):
                self._memory.note([pid])
            case events.RankExited(global_rank=global_rank, status=status):
                self._statuses[global_rank] = status
        failure = getattr(event, "failure", None)
        if failure is not None:
            self._fail(replace(failure, group_rank=machine.group_rank))

    def _fail(self, failure: FailureReport) -> None:
        self._failures[failure.group_rank, failure.global_rank] = failure
        self._step(Event.RANK_FAILED)

    def _show(self, machine: Machine, lines: list[str]) -> None:
        shown = []
        for line in lines:
            global_rank, text = parse_prefix(line)
            if global_rank is None:
                shown.append(f"[machine {machine.group_rank}] {line}")
            elif self._folder.shows(global_rank, text):
                shown.append(line)
        self._view.show(shown)
        for line in lines:
            training = parse_training_line(line)
            if training is not None:
                self._progress = self._progress.after(training)
                self._view.progress(self._progress)

    def _on_machine_ended(self, machine: Machine, status: int) -> None:
        """Its process was reaped: what it wrote is complete, and what it may have left is now beneath us."""
        self._end_orphans()
        while machine.is_readable():
            self._read(machine)
        machine.end(status)
        self._judge(machine, status)

    def _judge(self, machine: Machine, status: int) -> None:
        """Whether the end of a machine is a failure of the job."""
        shape = self._config.shape
        slot = machine.group_rank if machine.slot is None else machine.slot
        ranks = [shape.global_rank(slot, local_rank) for local_rank in range(shape.ranks_per_machine)]
        if status > 0 and all(global_rank in self._statuses for global_rank in ranks):
            return  # it only passes its ranks' failures on
        if status != 0 and -status not in machine.signals_sent:
            exception, details = last_words(machine.tail)
            self._fail(
                FailureReport(
                    global_rank=None,
                    group_rank=machine.group_rank,
                    time_s=time.monotonic(),
                    exit_code=status if status > 0 else None,
                    signal_number=-status if status < 0 else None,
                    exception=exception if status > 0 else "",
                    details=details if status > 0 else "",
                    process=self._process_name,
                )
            )

    def _spared(self) -> list[int]:
        return [pid for pid, machine in self._machines.items() if not machine.is_ended]

    def _end_orphans(self) -> None:
        """Ends everything beneath us but the living machines and what is beneath them."""
        spared = self._spared()

        def find() -> list[process_tree.ProcessRecord]:
            return process_tree.descendants(process_tree.read_processes(), os.getpid(), spared=spared)

        orphans = find()
        if orphans:
            self._memory.note(record.pid for record in orphans)
            process_tree.end_processes(find)

    def _sweep(self) -> None:
        for machine in self._machines.values():
            machine.close()
        self._end_orphans()
        process_tree.reap_children()
        left = process_tree.descendants(process_tree.read_processes(), os.getpid())
        for record in left:
            self._say(f"process {record.pid} can't be killed and is left behind")
        for removal in self._memory.clean():
            self._say(f"removed /dev/shm/{removal.name}: {removal.reason}")

    def _say(self, text: str) -> None:
        self._view.show([f"trainmover: {text}"])

    def _conclude(self, wall_s: float) -> int:
        verdict = first_failure(self._failures.values())
        if self._folder.folded:
            self._say(f"{self._folder.folded} warnings that several ranks printed alike were shown once")
        self._say(summarize(self._progress, wall_s=wall_s, log_dir=str(self._config.log_dir)))
        if verdict is not None:
            LineSink(sys.stderr.fileno()).write([f"trainmover: {line}" for line in describe(verdict)])
        shape = self._config.shape
        return exit_code(
            interrupted=signal.SIGINT in self._stop_signals,
            verdict=verdict,
            has_trained=self._progress.has_begun,
            all_ended_well=len(self._statuses) == shape.world_size and not any(self._statuses.values()),
        )
