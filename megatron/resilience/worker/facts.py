"""What of this process must equal the job's, or a joiner would change bits. Told in a rank's hello.

Source of the facts: torch's own report of its CPU kernels and math library; the trainer's of what it trains. Called by
`rank_worker`'s maker.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.resilience.agent.environment import inherited_environment
from megatron.resilience.agent.machine_facts import processor_of, steering_variables
from megatron.resilience.agent.own_sources import own_sources
from megatron.resilience.protocol.facts import Facts
from megatron.resilience.worker.arithmetic import arithmetic_lines

TEXT_CHARACTERS_MAX = 8192
"""Of one fact; what is beyond it counts by its digest."""


def local_facts(*, settings: Sequence[str], model_digest: str, data: Sequence[str], script: str) -> Facts:
    """The facts of this process. What it trains is told by the trainer: `model_digest` is equal only if training is,
    `settings` say why it is not; `data` and `script` have a digest in each line.
    """
    return Facts(
        torch=str(torch.__version__),
        megatron_core=importlib.metadata.version("megatron-core"),
        trainmover=importlib.metadata.version("trainmover"),
        sources=own_sources(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        processor=processor_of(Path("/proc/cpuinfo").read_text(errors="replace")),
        threads=str(torch.get_num_threads()),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        math_library=bounded(_math_library()),
        variables=steering_variables(inherited_environment()),
        arithmetic="\n".join(_arithmetic()),
        model_digest=model_digest,
        settings=bounded(settings),
        data=bounded(data),
        script=script,
    )


def bounded(lines: Sequence[str]) -> str:
    """`lines` as the text of a fact; those that are too many are its last line, a digest."""
    kept, room = list[str](), TEXT_CHARACTERS_MAX
    for number, line in enumerate(lines):
        room -= len(line) + 1
        if room < 0:
            rest = "\n".join(lines[number:])
            return "\n".join([*kept, f"{len(lines) - number} others={hashlib.sha256(rest.encode()).hexdigest()[:16]}"])
        kept.append(line)
    return "\n".join(kept)


def _arithmetic() -> list[str]:
    """Of the processor, which computes something of every training, and of the GPU if there is one."""
    lines = [f"CPU {line}" for line in arithmetic_lines(torch.device("cpu"))]
    if torch.cuda.is_available():
        lines += [f"GPU {line}" for line in arithmetic_lines(torch.device("cuda", torch.cuda.current_device()))]
    return lines


def _math_library() -> list[str]:
    """Each library and each setting of the build that torch names, by itself."""
    lines = (line.strip(" -") for line in torch.__config__.show().splitlines())
    return [part.strip(" ,") for line in lines for part in line.split(", ") if part.strip(" ,")]
