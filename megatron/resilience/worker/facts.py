"""What of this process must equal the job's, or a joiner would change bits. Told in a rank's hello.

Source of the facts: torch's own report of its CPU kernels and math library. Called by `rank_worker`'s maker.
"""

from __future__ import annotations

import hashlib
import importlib.metadata

import torch

from megatron.resilience.protocol.facts import Facts


def local_facts(*, model_configuration: str) -> Facts:
    """The facts of this process; `model_configuration` is any text that is equal only if training is."""
    return Facts(
        torch=str(torch.__version__),
        megatron_core=importlib.metadata.version("megatron-core"),
        trainmover=importlib.metadata.version("trainmover"),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        threads=str(torch.get_num_threads()),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        math_library=hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
        model_digest=hashlib.sha256(model_configuration.encode()).hexdigest(),
    )
