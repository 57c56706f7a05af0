"""A whole job on one computer with `--resilience`: agents stand where spawners stood, and a controller is beside them.

The controller may be killed: it is started again, at a bounded rate, and training never notices. Which machines hold
slots is told by the agents; the end of a machine that holds none is no failure of the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.resilience.agent import events, process_tree
from megatron.resilience.agent.environment import default_environment, inherited_environment
from megatron.resilience.agent.lifecycle import Event, State
from megatron.resilience.cli.job import Job, JobConfig
from megatron.resilience.cli.machine import Machine
from megatron.resilience.cli.network import Network
from megatron.resilience.cli.tls_flags import tls_words
from megatron.resilience.cli.view import View
from megatron.resilience.controller.directory import ResilienceDirectory
from megatron.resilience.controller.store import StoreError, read_ledger
from megatron.resilience.controller.wire import TlsFiles
from megatron.resilience.protocol.journal import JournalError

PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 10.0
"""Between two starts of a controller that keeps ending."""
_STEADY_S = 10.0
_WELL_S = 5.0
_BADLY_S = 0.5
_CONTROLLER_S = 3.0
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ResilienceConfig:
    """What `--resilience` adds to a job."""

    elastic: int
    """Machines that wait to join."""
    directory: ResilienceDirectory
    job: str
    token: str
    tls: TlsFiles | None
    """One certificate for the controller and all agents: they run on one computer."""


def has_ended(directory: ResilienceDirectory) -> bool:
    """Whether its journal says that the job is over. A controller may end well before that: by SIGTERM."""
    try:
        return read_ledger(directory.journal).ended
    except (StoreError, JournalError):
        return False


def last_line(log: Path) -> str:
    """Of a log, however long it is."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError as error:
        return f"what it said cannot be read: {error}"
    said = [line for line in lines if line.strip()]
    return said[-1] if said else "it said nothing"


def machine_name(group_rank: int) -> str:
    """Id of the machine that is started as the `group_rank`-th."""
    return f"machine-{group_rank}"


class ResilientJob(Job):
    """See the module."""

    _process_name = "agent"

    def __init__(self, config: JobConfig, resilience: ResilienceConfig, network: Network, view: View) -> None:
        super().__init__(config, view)
        self._resilience = resilience
        self._network = network
        self._controller: subprocess.Popen[bytes] | None = None
        self._controller_started_s = 0.0
        self._pause_s = PAUSE_S_MIN
        self._start_controller_s = float("inf")
        self._wind_down_s = float("inf")
        self._stopped_s = float("inf")
        self._stopped_why = ""
        self._has_begun = False
        """Whether any machine has ever held a slot."""

    # ------------------------------------------------------------------ starting

    def _start_machines(self) -> None:
        directory = self._resilience.directory
        directory.make()
        directory.write_token(self._resilience.token)
        directory.address_file.unlink(missing_ok=True)  # of a job before; agents would knock there
        elastic = self._resilience.elastic
        self._say(f"resilience in {directory.path}, {elastic} elastic machine{'s' * (elastic != 1)} at hand")
        self._start_controller()
        shape = self._config.shape
        for group_rank in range(shape.machines + self._resilience.elastic):
            machine = self._start_machine(
                group_rank, partial(self._agent_command, group_rank), self._environment(machine_name(group_rank))
            )
            machine.slot = None

    def _environment(self, machine_id: str) -> Mapping[str, str]:
        inherited = inherited_environment()
        return {
            "GRPC_VERBOSITY": "NONE",  # a controller that comes and goes is told in our own words
            **inherited,
            **default_environment(inherited, self._config.shape.master_addr),
            "TRAINMOVER_CONTROLLER": str(self._resilience.directory.path),
            "TRAINMOVER_TOKEN": self._resilience.token,
            "TRAINMOVER_JOB": self._resilience.job,
            "TRAINMOVER_MACHINE": machine_id,
        }

    def _agent_command(self, group_rank: int, report_fd: int) -> list[str]:
        config, shape = self._config, self._config.shape
        return [
            *self._network.prefix(group_rank),
            *(sys.executable, "-m", "megatron.resilience.agent.main"),
            *("--machines", str(shape.machines), "--ranks-per-machine", str(shape.ranks_per_machine)),
            *("--master-addr", shape.master_addr, "--master-port", str(shape.master_port)),
            *("--log-dir", str(config.log_dir), "--start", config.start.value),
            *("--grace-period", str(config.limits.grace_s), "--report-fd", str(report_fd)),
            *(("--elastic",) if group_rank >= shape.machines else ()),
            *tls_words(self._resilience.tls),
            *("--", config.script, *config.arguments),
        ]

    def _start_controller(self) -> None:
        directory, shape = self._resilience.directory, self._config.shape
        command = [
            *(sys.executable, "-m", "megatron.resilience.cli.main", "controller"),
            *("--resilience-dir", str(directory.path), "--job", self._resilience.job),
            *("--machines", str(shape.machines), "--ranks-per-machine", str(shape.ranks_per_machine)),
            *("--listen", f"{self._network.host_address}:0"),
            *tls_words(self._resilience.tls),
        ]
        self._start_controller_s = float("inf")
        self._controller_started_s = time.monotonic()
        try:
            with directory.controller_log.open("ab") as log:
                self._controller = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**inherited_environment(), "TRAINMOVER_TOKEN": self._resilience.token},
                    start_new_session=True,
                    preexec_fn=lambda: process_tree.set_parent_death_signal(signal.SIGTERM),
                )
        except OSError as error:  # no process, no descriptor, no room on the disk: training needs none of it
            self._start_controller_later(f"cannot be started ({error})")

    # ------------------------------------------------------------------ the loop

    def _next_deadline_s(self) -> float:
        return min(self._deadline_s, self._start_controller_s, self._wind_down_s, self._stopped_s)

    def _turn(self) -> None:
        super()._turn()
        now_s = time.monotonic()
        if now_s >= self._start_controller_s:
            self._start_controller()
        if now_s >= self._stopped_s and self._state is not State.ENDED:
            self._on_stopped()
        if len(self._statuses) == self._config.shape.world_size and self._wind_down_s == float("inf"):
            # All ranks have ended. The controller tells the agents so; if it does not, we do.
            self._wind_down_s = now_s + (_BADLY_S if any(self._statuses.values()) else _WELL_S)
        if now_s >= self._wind_down_s:
            self._wind_down_s = now_s + _WELL_S
            for machine in self._machines.values():
                machine.order_kill()

    def _on_child_ended(self, pid: int, status: int) -> None:
        if self._controller is None or pid != self._controller.pid:
            super()._on_child_ended(pid, status)
            return
        self._controller.returncode = status
        self._controller = None
        directory = self._resilience.directory
        if self._state is not State.RUNNING or (status == 0 and has_ended(directory)):
            return
        words = last_line(directory.controller_log)
        if not self._has_begun and not directory.address_file.exists():
            self._say(f"the controller cannot run: {words}")
            self._step(Event.KILL_REQUESTED)
            return
        self._start_controller_later(
            f"was killed by signal {-status}" if status < 0 else f"ended with code {status}: {words}"
        )

    def _start_controller_later(self, how: str) -> None:
        lived_s = time.monotonic() - self._controller_started_s
        self._pause_s = PAUSE_S_MIN if lived_s > _STEADY_S else min(PAUSE_S_MAX, 2 * self._pause_s)
        self._start_controller_s = time.monotonic() + self._pause_s
        self._say(f"the controller {how}; training goes on, it is started again")

    def _learn(self, machine: Machine, event: events.AgentEvent) -> None:
        match event:
            case events.SlotTaken(group_rank=slot):
                machine.slot, self._has_begun = slot, True
            case events.SlotReleased():
                machine.slot = None
            case events.JobStopped(why=why):
                self._stopped_why = self._stopped_why or why
                self._stopped_s = min(self._stopped_s, time.monotonic() + _BADLY_S)
            case _:
                super()._learn(machine, event)

    def _on_stopped(self) -> None:
        """The controller has stopped the job, and what agents told before that has come."""
        self._stopped_s = float("inf")
        if len(self._statuses) == self._config.shape.world_size or self._state is not State.RUNNING:
            return
        self._say(f"the controller has stopped the job: {self._stopped_why}")
        self._step(Event.RANK_FAILED)

    def _judge(self, machine: Machine, status: int) -> None:
        begins = not self._has_begun and machine.group_rank < self._config.shape.machines
        if machine.slot is not None or begins:
            super()._judge(machine, status)
        elif status != 0 and -status not in machine.signals_sent and self._state is State.RUNNING:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with code {status}"
            self._say(f"the agent of {machine_name(machine.group_rank)} {how}; it held no slot, the job goes on")

    # ------------------------------------------------------------------ the end

    def _spared(self) -> list[int]:
        controller = [] if self._controller is None else [self._controller.pid]
        return [*super()._spared(), *controller, *self._network.pids()]

    def _sweep(self) -> None:
        self._stop_controller()
        self._network.close()
        super()._sweep()

    def _stop_controller(self) -> None:
        controller, self._controller = self._controller, None
        if controller is None:
            return
        controller.terminate()
        try:
            controller.wait(_CONTROLLER_S)
        except subprocess.TimeoutExpired:
            controller.kill()
            controller.wait()
