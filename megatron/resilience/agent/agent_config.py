"""What an agent is told at its start, and the command line that it makes of it for each of its spawners."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.resilience.agent.controller_line import LineConfig
from megatron.resilience.agent.environment import JobShape
from megatron.resilience.agent.lifecycle import Limits
from megatron.resilience.agent.rank_start import StartMode


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """One machine's agent."""

    shape: JobShape
    script: str
    arguments: tuple[str, ...]
    start: StartMode
    log_dir: Path | None
    report_fd: int | None
    limits: Limits
    line: LineConfig
    first_contact_s: float
    """How long the first controller is waited for."""
    alone_s: float
    """How long an agent without ranks waits for a controller that was there before."""


def spawner_command(config: AgentConfig, *, machine_id: str, slot: int, generation: int) -> list[str]:
    """The command line of the spawner of one slot's ranks, without its --report-fd."""
    log_dir = () if config.log_dir is None else ("--log-dir", str(config.log_dir))
    return [
        *(sys.executable, "-m", "megatron.resilience.agent.spawner"),
        *("--machine", str(slot), "--machines", str(config.shape.machines)),
        *("--ranks-per-machine", str(config.shape.ranks_per_machine)),
        *("--master-addr", config.shape.master_addr, "--master-port", str(config.shape.master_port)),
        *(*log_dir, "--start", config.start.value, "--grace-period", str(config.limits.grace_s)),
        *("--machine-id", machine_id, "--generation", str(generation)),
        *("--", config.script, *config.arguments),
    ]
