"""Facts of a machine, told without torch, in torch's words."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from megatron.resilience.agent.machine_facts import capability_of, machine_facts, memory_bytes_of


@pytest.mark.parametrize(
    ("flags", "capability"),
    [
        ("fpu sse4_2", "DEFAULT"),
        ("fpu avx2 fma", "AVX2"),
        ("avx2", "DEFAULT"),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq", "AVX512"),
        ("avx2 fma avx512f", "AVX2"),
    ],
)
def test_capability_from_the_processors_flags(flags: str, capability: str) -> None:
    assert capability_of(f"processor : 0\nflags\t\t: {flags}\nbugs\t\t:\n") == capability


def test_processor_that_tells_no_flags_has_no_capability_to_compare() -> None:
    assert capability_of("Features : asimd\n") == ""


def test_capability_is_what_torch_itself_says_here() -> None:
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        assert capability_of(file.read()) == told.stdout.strip()


def test_user_may_tell_torch_to_use_less() -> None:
    facts = machine_facts(cpu_capability="avx2", threads="1", cpu_text="flags : avx2 fma avx512f")
    assert (facts.cpu_capability, facts.threads) == ("AVX2", "1")
    assert facts.torch == importlib.metadata.version("torch")
    assert facts.megatron_core == importlib.metadata.version("megatron-core")
    assert machine_facts(cpu_capability="?", threads="", cpu_text="").cpu_capability == ""


def test_memory_is_read_from_meminfo() -> None:
    assert memory_bytes_of("MemTotal:       16 kB\nMemFree: 1 kB\n") == 16 * 1024
    assert memory_bytes_of("nothing") == 0
