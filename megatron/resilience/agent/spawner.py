"""Starts and watches the ranks of one machine: `python -m megatron.resilience.agent.spawner ... -- SCRIPT ARGS`.

The launcher runs one a machine; so may Slurm, for spawners share nothing but the master's host and port. It imports
what the script names in PRELOAD once, forks (or execs) the ranks, passes their output on, and ends when they have
ended, leaving no process and no shared memory. With --report-fd it tells the launcher what happens and kills its ranks
when the launcher closes the other end, or dies.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.resilience.agent import events, lifecycle, log_merge, process_tree
from megatron.resilience.agent.environment import (
    JobShape,
    default_environment,
    inherited_environment,
    install_environment,
    rank_environment,
)
from megatron.resilience.agent.failure import FailureReport, describe, exit_code, first_failure
from megatron.resilience.agent.lifecycle import Event, Limits, State
from megatron.resilience.agent.output import LineSink
from megatron.resilience.agent.progress import parse_training_line
from megatron.resilience.agent.rank_start import RankDuty, RankPlan, StartedRank, StartMode, start_rank
from megatron.resilience.agent.rank_watch import RankState, RankWatch
from megatron.resilience.agent.script import read_script_facts
from megatron.resilience.agent.shared_memory import SharedMemoryWatch
from megatron.resilience.agent.signals import WATCHED_SIGNALS, SignalInbox

_DRAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnerConfig:
    """One machine's part of a job."""

    group_rank: int
    """Slot of this machine."""
    shape: JobShape
    script: str
    arguments: tuple[str, ...]
    start: StartMode
    log_dir: Path | None
    report_fd: int | None
    limits: Limits
    machine_id: str | None
    """What its agent calls this machine; None without an agent."""
    generation: int
    """In which its agent starts these ranks: above 1 they take over a slot of a running job."""


def rank_log_path(log_dir: Path, global_rank: int, generation: int = 1) -> Path:
    """Where the output of a rank is kept; a joiner's beside its leaver's."""
    return log_dir / (f"rank-{global_rank:04d}" + (f".generation-{generation}" if generation > 1 else "") + ".log")


class Spawner:
    """The loop of one machine. Nothing here may block for long."""

    def __init__(
        self, config: SpawnerConfig, started: Sequence[StartedRank], signals: SignalInbox, memory: SharedMemoryWatch
    ) -> None:
        self._config = config
        self._signals = signals
        self._memory = memory
        self._sink = LineSink(sys.stdout.fileno())
        self._selector = selectors.DefaultSelector()
        self._state = State.RUNNING
        self._deadline_s = float("inf")
        self._stop_signals: list[int] = []
        self._has_trained = False
        self._ranks: dict[int, RankWatch] = {}
        for rank in started:
            log_dir = config.log_dir
            path = None if log_dir is None else rank_log_path(log_dir, rank.global_rank, config.generation)
            self._ranks[rank.pid] = RankWatch(rank, group_rank=config.group_rank, log_path=path)

    def run(self) -> int:
        """Watches until all ranks have ended and nothing of them is left. Returns the exit code."""
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        if self._config.report_fd is not None:
            self._selector.register(self._config.report_fd, selectors.EVENT_READ, self._on_launcher_gone)
        for watch in self._ranks.values():
            watch.open()
            self._selector.register(watch.started.output, selectors.EVENT_READ, watch)
            self._selector.register(watch.started.report, selectors.EVENT_READ, watch)
            self._tell(events.RankStarted(global_rank=watch.started.global_rank, pid=watch.started.pid))
        self._memory.note(self._ranks)
        try:
            while self._state is not State.ENDED:
                for key, _ in self._selector.select(self._timeout_s()):
                    if isinstance(key.data, RankWatch):
                        self._on_rank_readable(key.data, key.fd)
                    else:
                        key.data()
                self._on_time()
        finally:
            self._sweep()
        return self._conclude()

    def _timeout_s(self) -> float | None:
        draining = (watch.drain_deadline_s for watch in self._ranks.values() if watch.state is RankState.DRAINING)
        nearest = min([self._deadline_s, *draining])
        return None if nearest == float("inf") else max(0.0, nearest - time.monotonic())

    def _step(self, event: Event) -> None:
        before, self._state = self._state, lifecycle.transition(self._state, event)
        if self._state is before:
            return
        limit_s = self._config.limits.of(self._state)
        self._deadline_s = float("inf") if limit_s is None else time.monotonic() + limit_s
        if self._state in (State.SETTLING, State.KILLING):
            self._memory.note(record.pid for record in self._descendants())
        if self._state is State.KILLING:
            for watch in self._ranks.values():
                watch.send(signal.SIGKILL)

    def _on_time(self) -> None:
        now_s = time.monotonic()
        for watch in self._ranks.values():
            if watch.state is RankState.DRAINING and now_s >= watch.drain_deadline_s:
                self._close(watch)
        if all(watch.state is RankState.CLOSED for watch in self._ranks.values()):
            if self._state is not State.ENDED:
                self._step(Event.ALL_ENDED)
        elif now_s >= self._deadline_s:
            self._step(Event.DEADLINE_PASSED)

    def _on_signals(self) -> None:
        for number in self._signals.read():
            if number == signal.SIGCHLD:
                for pid, status in process_tree.reap_children(self._end_helpers):
                    self._on_reaped(pid, status)
                continue
            # Slurm sends SIGTERM twice at a job's time limit: only a second Ctrl-C means "at once" here.
            if number == signal.SIGINT and signal.SIGINT in self._stop_signals:
                self._step(Event.KILL_REQUESTED)
                continue
            self._stop_signals.append(number)
            if self._state in (State.RUNNING, State.STOPPING):
                for watch in self._ranks.values():
                    watch.send(signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM)
            self._step(Event.STOP_REQUESTED)

    def _on_launcher_gone(self) -> None:
        assert self._config.report_fd is not None
        self._selector.unregister(self._config.report_fd)
        self._step(Event.KILL_REQUESTED)

    def _end_helpers(self, pid: int) -> None:
        """Before a dead rank is reaped, and its group's number freed: ends what is left of its group."""
        if pid in self._ranks:
            members = process_tree.group_members(process_tree.read_processes(), pid)
            self._memory.note(record.pid for record in members)
            process_tree.end_processes(lambda: process_tree.group_members(process_tree.read_processes(), pid))

    def _on_reaped(self, pid: int, status: int) -> None:
        watch = self._ranks.get(pid)
        if watch is None:
            return  # an orphan of some rank
        watch.end(status, now_s=time.monotonic(), drain_s=_DRAIN_S)
        self._read_report(watch)
        if watch.has_failed:
            self._step(Event.RANK_FAILED)

    def _on_rank_readable(self, watch: RankWatch, descriptor: int) -> None:
        if descriptor not in self._selector.get_map():
            return  # finished earlier in this round
        if descriptor == watch.started.report:
            self._read_report(watch)
            return
        lines, has_more = watch.read_output()
        self._show(watch, lines)
        if not has_more:
            self._selector.unregister(descriptor)
            if watch.state is RankState.DRAINING:
                self._close(watch)

    def _read_report(self, watch: RankWatch) -> None:
        if watch.started.report not in self._selector.get_map():
            return
        failure, has_more = watch.read_report()
        if not has_more:
            self._selector.unregister(watch.started.report)
        if failure is not None:
            self._tell(events.RankFailed(failure=failure))
            self._step(Event.RANK_FAILED)

    def _close(self, watch: RankWatch) -> None:
        while watch.started.output in self._selector.get_map():
            lines, has_more = watch.read_output()
            self._show(watch, lines)
            if not lines or not has_more:
                self._selector.unregister(watch.started.output)
        if watch.started.report in self._selector.get_map():
            self._selector.unregister(watch.started.report)
        self._show(watch, watch.close())
        failure = watch.failure()
        self._tell(events.RankExited(global_rank=watch.started.global_rank, status=watch.status, failure=failure))

    def _show(self, watch: RankWatch, lines: list[str]) -> None:
        self._has_trained = self._has_trained or any(parse_training_line(line) for line in lines)
        prefix = log_merge.prefix(watch.started.global_rank, self._config.shape.world_size)
        self._sink.write([prefix + line for line in lines])

    def _tell(self, event: events.AgentEvent) -> None:
        if self._config.report_fd is None:
            return
        data = events.encode(event)
        try:
            while data:
                data = data[os.write(self._config.report_fd, data) :]
        except (BrokenPipeError, ConnectionError):
            return  # the loop sees the same and acts on it

    def _descendants(self) -> list[process_tree.ProcessRecord]:
        return process_tree.descendants(process_tree.read_processes(), os.getpid())

    def _sweep(self) -> None:
        """Ends and reaps whatever is still beneath this process, wherever it went."""
        left = self._descendants()
        self._memory.note(record.pid for record in left)
        process_tree.end_processes(self._descendants)
        process_tree.reap_children()
        for record in self._descendants():
            self._sink.write([f"machine {self._config.group_rank}: process {record.pid} can't be killed; left behind"])
        self._memory.clean()

    def _conclude(self) -> int:
        failures: list[FailureReport] = [f for watch in self._ranks.values() if (f := watch.failure()) is not None]
        verdict = first_failure(failures)
        if verdict is not None and self._config.report_fd is None:
            LineSink(sys.stderr.fileno()).write(describe(verdict))
        return exit_code(
            interrupted=signal.SIGINT in self._stop_signals,
            verdict=verdict,
            has_trained=self._has_trained,
            all_ended_well=all(watch.status == 0 for watch in self._ranks.values()),
        )


def parse_arguments(argv: Sequence[str]) -> SpawnerConfig:
    """Reads the command line. Exits with 2 if it is wrong."""
    parser = argparse.ArgumentParser(prog="spawner", description="Starts the ranks of one machine.", allow_abbrev=False)
    parser.add_argument("--machine", type=int, required=True, help="slot of this machine, from 0")
    parser.add_argument("--machines", type=int, required=True)
    parser.add_argument("--ranks-per-machine", type=int, required=True)
    parser.add_argument("--master-addr", required=True, help="where rank 0 listens")
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--log-dir", type=Path, help="keep each rank's output in a file here")
    parser.add_argument("--start", choices=[mode.value for mode in StartMode], default=StartMode.FORK.value)
    parser.add_argument("--grace-period", type=float, default=Limits().grace_s, help="seconds after a forwarded signal")
    parser.add_argument("--report-fd", type=int, help="descriptor for events, one JSON object a line")
    parser.add_argument("--machine-id", help="what its agent calls this machine")
    parser.add_argument("--generation", type=int, default=1, help="in which its agent starts these ranks")
    own, script = split_at_script(argv)
    options = parser.parse_args(own)
    if not script:
        parser.error("found no script, expected `-- SCRIPT ARGS` at the end")
    if not 0 <= options.machine < options.machines or options.ranks_per_machine < 1:
        parser.error(f"found machine {options.machine} of {options.machines}, expected one from 0 to machines - 1")
    return SpawnerConfig(
        group_rank=options.machine,
        shape=JobShape(
            machines=options.machines,
            ranks_per_machine=options.ranks_per_machine,
            master_addr=options.master_addr,
            master_port=options.master_port,
        ),
        script=script[0],
        arguments=tuple(script[1:]),
        start=StartMode(options.start),
        log_dir=options.log_dir,
        report_fd=options.report_fd,
        limits=Limits(grace_s=options.grace_period),
        machine_id=options.machine_id,
        generation=options.generation,
    )


def split_at_script(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(our own arguments, script and its arguments): what stands before and after the first `--`."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def _preload(config: SpawnerConfig) -> None:
    """Makes this process what the ranks are to be forks of."""
    script = Path(config.script)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(script.resolve().parent)
    for name in read_script_facts(script).preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that a collection in a rank doesn't copy the shared pages


def _start_ranks(config: SpawnerConfig, signals: SignalInbox) -> list[StartedRank] | RankDuty:
    """In the spawner the started ranks; in a forked rank its duty."""
    started: list[StartedRank] = []
    kept = [] if config.report_fd is None else [config.report_fd]
    for local_rank in range(config.shape.ranks_per_machine):
        environment = rank_environment(
            config.shape, group_rank=config.group_rank, local_rank=local_rank, machine_id=config.machine_id
        )
        plan = RankPlan(
            global_rank=config.shape.global_rank(config.group_rank, local_rank),
            script=config.script,
            arguments=config.arguments,
            environment=tuple(environment.items()),
            start=config.start,
        )
        held = kept + [descriptor for rank in started for descriptor in (rank.output, rank.report)]
        rank = start_rank(plan, close_in_child=held, in_child=signals.leave_in_child)
        if isinstance(rank, RankDuty):
            return rank
        started.append(rank)
    return started


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the module. A forked rank comes back here too, so that its interpreter ends as any other does."""
    config = parse_arguments(sys.argv[1:] if argv is None else argv)
    process_tree.become_subreaper()
    if config.report_fd is not None:
        # While importing there is no loop yet, and no rank: the launcher's death may simply end this process.
        process_tree.set_parent_death_signal(signal.SIGTERM)
        os.set_inheritable(config.report_fd, False)
    install_environment(default_environment(inherited_environment(), config.shape.master_addr))
    if config.log_dir is not None:
        config.log_dir.mkdir(parents=True, exist_ok=True)
    if config.start is StartMode.FORK:
        _preload(config)
    memory = SharedMemoryWatch()
    signals = SignalInbox()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
    signals.open()
    started = _start_ranks(config, signals)
    if isinstance(started, RankDuty):
        return started.run()
    process_tree.set_parent_death_signal(0)  # from here on the report descriptor tells, without a race
    spawner = Spawner(config, started, signals, memory)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED_SIGNALS)
    return spawner.run()


if __name__ == "__main__":
    sys.exit(main())
