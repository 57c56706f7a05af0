"""Imports that a spawner does once before it forks its ranks, in the one order that works.

Device first, then megatron-core, then its patches, then the modules that a GPT job imports anyway. Importing this
module has these effects; `pretrain()` imports it too, so a rank started by another launcher gets the same.
"""

from __future__ import annotations

import contextlib
import logging
import warnings

import torch

from megatron.training import device

device.install_device()
if not device.on_cuda():
    torch.set_num_threads(1)  # two threads reduce in another order: other bits
warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
logging.getLogger("megatron.core").setLevel(logging.ERROR)

import megatron.core.datasets.blended_megatron_dataset_builder  # noqa: E402
import megatron.core.datasets.gpt_dataset  # noqa: E402
import megatron.core.dist_checkpointing  # noqa: E402
import megatron.core.dist_checkpointing.strategies.torch  # noqa: E402
import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.core.models.gpt.gpt_model  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.optimizer_param_scheduler  # noqa: E402
import megatron.core.pipeline_parallel  # noqa: E402, F401

from megatron.resilience.patches.registry import apply_patches  # noqa: E402

with contextlib.suppress(ImportError):  # where the extension is not built, the other backends work
    import trainmover_ext  # noqa: F401

apply_patches(on_cuda=device.on_cuda())
