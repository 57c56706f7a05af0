"""What can be told of this machine without importing torch: versions and properties that change bits, and its room.

An agent tells them in its hello, so that a machine which would train other bits is refused before anything starts
there. What only a rank can know (its model's digest) ranks tell themselves.
"""

from __future__ import annotations

import importlib.metadata
import re

from megatron.resilience.protocol.facts import Facts

_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}
_AVX2 = {"avx2", "fma"}


def machine_facts(*, cpu_capability: str, threads: str, cpu_text: str) -> Facts:
    """Facts of this machine. `cpu_capability` is what the user tells torch to use, `cpu_text` is /proc/cpuinfo."""
    return Facts(
        torch=_version("torch"),
        megatron_core=_version("megatron-core"),
        trainmover=_version("trainmover"),
        cpu_capability=_told_capability(cpu_capability) or capability_of(cpu_text),
        threads=threads,
    )


def capability_of(cpu_text: str) -> str:
    """As torch names it; empty where this is not known to be what torch would say."""
    found = re.search(r"^flags\s*:(.*)$", cpu_text, flags=re.MULTILINE)
    if found is None:
        return ""
    flags = set(found[1].split())
    if flags >= _AVX512:
        return "AVX512"
    return "AVX2" if flags >= _AVX2 else "DEFAULT"


def memory_bytes_of(memory_text: str) -> int:
    """MemTotal of /proc/meminfo; 0 if it is not there."""
    found = re.search(r"^MemTotal:\s*(\d+) kB$", memory_text, flags=re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _told_capability(text: str) -> str:
    return text.upper() if text.lower() in ("avx512", "avx2", "default") else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
