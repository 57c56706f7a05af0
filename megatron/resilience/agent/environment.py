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


def rank_environment(shape: JobShape, *, group_rank: int, local_rank: int) -> dict[str, str]:
    """The variables that tell a rank its place, named and counted as torchrun does, and which ranks share a machine.

    Machines of one computer are told apart, so that what runs between them is what runs between real ones.
    """
    return {
        "RANK": str(shape.global_rank(group_rank, local_rank)),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(shape.world_size),
        "LOCAL_WORLD_SIZE": str(shape.ranks_per_machine),
        "GROUP_RANK": str(group_rank),
        "MASTER_ADDR": shape.master_addr,
        "MASTER_PORT": str(shape.master_port),
        "TRAINMOVER_MACHINE": f"slot-{group_rank}",
    }
