"""The one place where the trainer reads its environment variables: what a launcher tells each process. No torch.

torchrun and `trainmover run` set the same names. Called by `pretrain()` and by the preflight.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.training.config import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Place of this process in the job, and where the ranks meet (rank 0 listens on `master_port`)."""

    global_rank: int
    local_rank: int
    world_size: int
    master_address: str
    master_port: int
    agent: str = ""
    """Socket of the machine's agent; empty: machines of this job are not replaced."""
    join_generation: int | None = None
    """The switch for which this rank was started, to take a running rank's place; None: it starts with the job."""
    counts_tensors: bool = False
    """Incidents tell what tensors really hold, also without CUDA, where counting them takes time: for proofs."""


def read_environment(local_rank_flag: int | None = None, source: Mapping[str, str] | None = None) -> Environment:
    """RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and what an agent adds; started by hand it is rank 0 of 1.

    `local_rank_flag` is what older launchers pass as --local-rank; the variable wins. `source` replaces os.environ.
    Raises SettingsError when a variable is not a number or the rank is not below the world size.
    """
    variables = os.environ if source is None else source

    def number(name: str, default: int) -> int:
        text = variables.get(name, str(default))
        if not (text.isascii() and text.isdigit()):
            raise SettingsError(f"environment variable {name} is {text!r}, expected a number; start by trainmover run")
        return int(text)

    environment = Environment(
        global_rank=number("RANK", 0),
        local_rank=number("LOCAL_RANK", local_rank_flag or 0),
        world_size=number("WORLD_SIZE", 1),
        master_address=variables.get("MASTER_ADDR", "127.0.0.1"),
        master_port=number("MASTER_PORT", 0),
        agent=variables.get("TRAINMOVER_AGENT", ""),
        join_generation=number("TRAINMOVER_JOIN_GENERATION", 0) or None,
        counts_tensors=bool(number("TRAINMOVER_COUNT_TENSORS", 0)),
    )
    if environment.world_size < 1:
        raise SettingsError("environment variable WORLD_SIZE is '0', expected the number of ranks")
    if environment.join_generation and not environment.agent:
        raise SettingsError("TRAINMOVER_JOIN_GENERATION is set and TRAINMOVER_AGENT is not; only agents start joiners")
    if environment.global_rank >= environment.world_size:
        raise SettingsError(
            f"RANK {environment.global_rank} is not below WORLD_SIZE {environment.world_size}; start by trainmover run"
        )
    return environment


def cuda_may_be_there() -> bool:
    """Whether this machine has an NVIDIA device that is not hidden from this process, without importing torch."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not is_hidden and Path("/dev/nvidiactl").exists() and importlib.util.find_spec("torch") is not None
