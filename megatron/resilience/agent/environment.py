"""The environment a rank sees, the same as under torchrun.

The only file of launcher and spawner that touches os.environ. Called by the launcher, for its spawners and the
preflight run, and by the spawner, for each rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """Size of the job and where its rank 0 listens."""

    machines: int
    ranks_per_machine: int
    master_addr: str
    master_port: int

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return self.machines * self.ranks_per_machine

    def global_rank(self, group_rank: int, local_rank: int) -> int:
        """Global rank of the `local_rank`-th rank on the machine in slot `group_rank`."""
        return group_rank * self.ranks_per_machine + local_rank


def inherited_environment() -> dict[str, str]:
    """A copy of what this process was started with."""
    return dict(os.environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """What the environment says of the job's control plane; empty where it says nothing."""

    controller: str
    """TRAINMOVER_CONTROLLER: host:port, or a file or resilience directory that has it."""
    token: str
    """TRAINMOVER_TOKEN."""
    job: str
    """TRAINMOVER_JOB."""
    machine_id: str
    """TRAINMOVER_MACHINE."""
    resilience_dir: str
    """TRAINMOVER_RESILIENCE_DIR."""
    threads: str
    """OMP_NUM_THREADS: threads of a rank's arithmetic."""
    cpu_capability: str
    """ATEN_CPU_CAPABILITY: what torch is told to use of this processor."""


def control_settings(environment: Mapping[str, str]) -> ControlSettings:
    """Reads them, once, at the start of an agent, a controller or a user's command."""
    return ControlSettings(
        controller=environment.get("TRAINMOVER_CONTROLLER", ""),
        token=environment.get("TRAINMOVER_TOKEN", ""),
        job=environment.get("TRAINMOVER_JOB", ""),
        machine_id=environment.get("TRAINMOVER_MACHINE", ""),
        resilience_dir=environment.get("TRAINMOVER_RESILIENCE_DIR", ""),
        threads=environment.get("OMP_NUM_THREADS", ""),
        cpu_capability=environment.get("ATEN_CPU_CAPABILITY", ""),
    )


def joining_environment(*, socket_path: str, generation: int) -> dict[str, str]:
    """What a rank under an agent has besides: the agent's socket and, if it joins a running job, that it does."""
    joins = {"TRAINMOVER_JOIN_GENERATION": str(generation), "TRAINMOVER_MODE": "isolated"}
    return {"TRAINMOVER_AGENT": socket_path, **(joins if generation > 1 else {})}


def install_environment(values: Mapping[str, str]) -> None:
    """Sets `values` in this process, for the modules it is going to import and the children it forks."""
    os.environ.update(values)


def is_loopback(address: str) -> bool:
    """Whether `address` names this computer only."""
    return address in {"localhost", "::1"} or address.startswith("127.")


def default_environment(inherited: Mapping[str, str], master_addr: str) -> dict[str, str]:
    """What is set unless the user did: one thread a rank (two change the bits of a sum), gloo on loopback.

    A spawner that asks torch whether CUDA is there must not start the driver, which does not survive a fork.
    """
    wanted = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if is_loopback(master_addr):
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in wanted.items() if name not in inherited}


def rank_environment(
    shape: JobShape, *, group_rank: int, local_rank: int, machine_id: str | None = None
) -> dict[str, str]:
    """The variables that tell a rank its place, named and counted as torchrun does, and which ranks share a machine.

    Machines of one computer are told apart, so that what runs between them is what runs between real ones. Without an
    agent nobody gives a `machine_id`, and machines are as their slots.
    """
    return {
        "RANK": str(shape.global_rank(group_rank, local_rank)),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(shape.world_size),
        "LOCAL_WORLD_SIZE": str(shape.ranks_per_machine),
        "GROUP_RANK": str(group_rank),
        "MASTER_ADDR": shape.master_addr,
        "MASTER_PORT": str(shape.master_port),
        "TRAINMOVER_MACHINE": f"slot-{group_rank}" if machine_id is None else machine_id,
    }
