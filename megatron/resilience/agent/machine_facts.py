"""What can be told of this machine without importing torch: versions and properties that change bits, and its room.

An agent tells them in its hello, so that a machine which would train other bits is refused before anything starts
there. What only a rank can know (its model's digest) ranks tell themselves.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping

from megatron.resilience.agent.own_sources import own_sources
from megatron.resilience.protocol.facts import Facts

_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}
_AVX2 = {"avx2", "fma"}
_EXTENSIONS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
"""By which libraries choose kernels."""

_STEERING_PREFIXES = ("MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "BLIS_", "CUBLAS_", "CUDNN_", "NVTE_")
_STEERING = {
    *("ATEN_CPU_CAPABILITY", "OMP_DYNAMIC", "OMP_THREAD_LIMIT", "GLIBC_TUNABLES"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT"),
}
"""Variables that choose kernels, precision or threads. OMP_NUM_THREADS is a fact of its own."""
_SET_BY_RANKS = {"NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"}
"""megatron-core sets them from the model's configuration, and wants no others: agents and ranks would differ."""


def machine_facts(*, cpu_capability: str, threads: str, cpu_text: str, variables: str) -> Facts:
    """Facts of this machine. `cpu_capability` is what the user tells torch to use, `cpu_text` is /proc/cpuinfo."""
    return Facts(
        torch=_version("torch"),
        megatron_core=_version("megatron-core"),
        trainmover=_version("trainmover"),
        sources=own_sources(),
        cpu_capability=_told_capability(cpu_capability) or capability_of(cpu_text),
        processor=processor_of(cpu_text),
        threads=threads,
        variables=variables,
    )


def steering_variables(environment: Mapping[str, str]) -> str:
    """Those that steer arithmetic, as `NAME=value`, one a line by their names; `none` if there are none."""
    told = [
        f"{name}={' '.join(value.split())}"
        for name, value in sorted(environment.items())
        if (name in _STEERING or name.startswith(_STEERING_PREFIXES))
        and not name.endswith("_VERBOSE")
        and name not in _SET_BY_RANKS
    ]
    return "\n".join(told) or "none"


def processor_of(cpu_text: str) -> str:
    """One line for a person: who made it, which it is, and its extensions; empty where /proc/cpuinfo does not say."""

    def told(name: str) -> str:
        found = re.search(rf"^{name}\s*:(.*)$", cpu_text, flags=re.MULTILINE)
        return found[1].strip() if found else ""

    flags = told("flags").split()
    parts = [told("vendor_id"), told("cpu family"), told("model"), told("model name")]
    if not any(parts):
        return ""
    vendor, family, model, name = parts
    extensions = " ".join(extension for extension in _EXTENSIONS if extension in flags)
    return f"{name} ({vendor} family {family} model {model}: {extensions or 'no extensions'})"


def capability_of(cpu_text: str) -> str:
    """As torch names it; empty where this is not known to be what torch would say."""
    found = re.search(r"^flags\s*:(.*)$", cpu_text, flags=re.MULTILINE)
    if found is None:
        return ""
    flags = set(found[1].split())
    if flags >= _AVX512:
        return "AVX512"
    return "AVX2" if flags >= _AVX2 else "DEFAULT"


def kernel_bytes(text: str, name: str) -> int:
    """Of the line `name:  N kB` in `text` of /proc/meminfo or /proc/PID/status, in bytes; 0 if there is none."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", text, flags=re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _told_capability(text: str) -> str:
    return text.upper() if text.lower() in ("avx512", "avx2", "default") else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
