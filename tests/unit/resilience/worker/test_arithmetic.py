"""The probe of arithmetic: the same each time, another with other kernels, and no generator moves."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron.resilience.worker.arithmetic import arithmetic_lines

CPU = torch.device("cpu")
PROBE = """
import torch
from megatron.resilience.worker.arithmetic import arithmetic_lines
torch.set_num_threads(1)
print(*arithmetic_lines(torch.device("cpu")), sep="\\n")
"""


def lines_of(**variables: str) -> list[str]:
    """Of a process with these variables."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **variables},
    )
    return done.stdout.splitlines()


def test_each_calculation_has_a_line_and_comes_out_the_same_again() -> None:
    lines = arithmetic_lines(CPU)
    names = [line.partition("=")[0] for line in lines]
    assert len(set(names)) == len(names)
    for name in ("float32 product 32x64x48", "bfloat16 product 7x300x5 transposed", "float32 softmax", "bfloat16 sum"):
        assert name in names
    assert arithmetic_lines(CPU) == lines


def test_no_generator_moves_and_no_mode_changes() -> None:
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    arithmetic_lines(CPU)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index]
    assert torch.is_grad_enabled()


def test_a_single_bit_of_one_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, gelu = arithmetic_lines(CPU), torch.nn.functional.gelu

    def other(values: torch.Tensor) -> torch.Tensor:
        result = gelu(values).clone()
        result[0, 0] = torch.nextafter(result[0, 0], torch.tensor(9.0, dtype=result.dtype))
        return result

    monkeypatch.setattr(torch.nn.functional, "gelu", other)
    changed = [line for line, was in zip(arithmetic_lines(CPU), lines, strict=True) if line != was]
    assert [line.partition("=")[0] for line in changed] == ["float32 gelu", "bfloat16 gelu"]


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="here is one kind of kernels")
def test_other_kernels_are_other_lines() -> None:
    usual = lines_of()
    assert lines_of() == usual
    assert lines_of(ATEN_CPU_CAPABILITY="default") != usual
