"""What must be equal on two machines, or the bits of training would differ after one took the other's place.

Agents tell them in their hello (the model's digest is known to ranks alone), the controller compares them.
"""

from __future__ import annotations

import msgspec


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions and properties that change bits. Empty means not known on this side, and is not compared."""

    torch: str = ""
    megatron_core: str = ""
    trainmover: str = ""
    cpu_capability: str = ""
    """As torch names it, e.g. AVX2."""
    threads: str = ""
    """Threads of one rank's arithmetic."""
    gpu: str = ""
    math_library: str = ""
    model_digest: str = ""
    """Of the whole configuration of model, optimizer and data; told by ranks."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine can hold."""

    ranks: int
    memory_bytes: int


NAMES = {
    "torch": "torch",
    "megatron_core": "megatron-core",
    "trainmover": "trainmover",
    "cpu_capability": "CPU capability",
    "threads": "number of threads",
    "gpu": "GPU",
    "math_library": "math library",
    "model_digest": "model configuration",
}


def differences(found: Facts, expected: Facts) -> tuple[str, ...]:
    """One text for each fact in which `found` (a joiner's) differs from `expected` (the job's)."""
    texts = []
    for field, name in NAMES.items():
        ours, theirs = getattr(found, field), getattr(expected, field)
        if ours and theirs and ours != theirs:
            texts.append(f"{name}: found {ours}, the job runs {theirs}")
    return tuple(texts)
