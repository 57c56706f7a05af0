"""Facts of a machine, told without torch, in torch's words."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from megatron.resilience.agent.machine_facts import (
    capability_of,
    kernel_bytes,
    machine_facts,
    processor_of,
    steering_variables,
)
from megatron.resilience.agent.own_sources import own_sources


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
    facts = machine_facts(cpu_capability="avx2", threads="1", cpu_text="flags : avx2 fma avx512f", variables="none")
    assert (facts.cpu_capability, facts.threads, facts.variables) == ("AVX2", "1", "none")
    assert facts.sources == own_sources()
    assert facts.torch == importlib.metadata.version("torch")
    assert facts.megatron_core == importlib.metadata.version("megatron-core")
    assert machine_facts(cpu_capability="?", threads="", cpu_text="", variables="").cpu_capability == ""


def test_memory_is_read_from_what_the_kernel_tells() -> None:
    assert kernel_bytes("MemTotal:       16 kB\nMemFree: 1 kB\n", "MemTotal") == 16 * 1024
    assert kernel_bytes("VmPeak:\t 9 kB\nVmHWM:\t    2048 kB\nVmRSS:\t 5 kB\n", "VmHWM") == 2 << 20
    assert kernel_bytes("nothing", "MemTotal") == 0


def test_variables_that_steer_arithmetic_are_told_and_no_others() -> None:
    others = {"PATH": "/bin", "MKL_VERBOSE": "1", "OMP_NUM_THREADS": "4", "NVTE_FLASH_ATTN": "1"}
    steering = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2"}
    expected = "ATEN_CPU_CAPABILITY=avx2\nMKL_CBWR=COMPATIBLE\nONEDNN_MAX_CPU_ISA=AVX2"
    assert steering_variables({**others, **steering}) == expected
    assert steering_variables({"PATH": "/bin"}) == "none"


def test_processor_is_one_line_with_the_extensions_that_matter() -> None:
    text = (
        "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Xeon\n"
        "flags\t\t: fpu avx2 avx512f amx_tile amx_bf16\n"
    )
    assert processor_of(f"{text}\n{text.replace('143', '1')}") == (
        "Xeon (GenuineIntel family 6 model 143: avx2 avx512f amx_tile amx_bf16)"
    )
    assert processor_of("") == ""
