"""The CPU stands in for CUDA: each shim is needed, and none is there where CUDA is."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron.training import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is absent where CUDA is")


def run_python(code: str) -> str:
    """Output of `code` in a fresh process, since the shim cannot be taken out of this one."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_megatron_cores_device_calls_mean_the_cpu() -> None:
    device.install_device()
    assert str(torch.cuda.current_device()) == "cpu"
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.ones(2).to("cuda").cuda().device.type == "cpu"
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    assert not device.on_cuda()


def test_the_device_generator_is_the_cpus() -> None:
    device.install_device()
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))


def test_queued_device_calls_run_at_once() -> None:
    device.install_device()
    ran = []
    torch.cuda._lazy_call(lambda: ran.append(True))  # type: ignore[no-untyped-call]
    assert ran == [True]


def test_streams_and_events_are_all_alike_and_done() -> None:
    device.install_device()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    assert stream == torch.cuda.current_stream()
    assert stream.record_event().query()
    with torch.cuda.stream(stream):
        pass


def test_installing_twice_changes_nothing_more() -> None:
    device.install_device()
    zeros = torch.zeros
    device.install_device()
    assert torch.zeros is zeros


def test_the_shim_is_absent_where_cuda_is() -> None:
    output = run_python(
        "import torch; torch.cuda.is_available = lambda: True\n"
        "from megatron.training import device; before = torch.cuda.current_device\n"
        "device.install_device(); print(torch.cuda.current_device is before, device.on_cuda())"
    )
    assert output == "True True"


@pytest.mark.parametrize(
    ("shim", "use"),
    [
        (
            "_shim_current_device",
            "from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed as seed\nseed(1)",
        ),
        ("_shim_synchronize", "torch.cuda.synchronize()"),
        ("_shim_random", "torch.cuda.get_rng_state()"),
        ("_shim_factories", "torch.zeros(1, device='cuda')"),
        ("_shim_moves", "torch.zeros(1).cuda()"),
        ("_shim_streams", "torch.cuda.Stream()"),
        ("_shim_type_names", "assert torch.ones(1).type().startswith('torch.cuda.')"),
        ("_shim_lazy_call", "ran = []; torch.cuda._lazy_call(lambda: ran.append(1)); assert ran"),
    ],
)
def test_each_shim_is_needed(shim: str, use: str) -> None:
    output = run_python(
        "import torch; from megatron.training import device\n"
        f"device._SHIMS = tuple(s for s in device._SHIMS if s.__name__ != {shim!r}); device.install_device()\n"
        "import warnings; warnings.simplefilter('ignore'); import megatron.core.parallel_state as ps\n"
        "ps.get_tensor_model_parallel_rank = ps.get_expert_model_parallel_rank = lambda *a: 0\n"
        f"try:\n    exec({use!r})\nexcept (RuntimeError, AssertionError, AttributeError, TypeError, ValueError) as e:\n"
        "    print('fails', type(e).__name__)\n"
    )
    assert output.startswith("fails"), f"without {shim}, {use} was expected to fail: {output}"
