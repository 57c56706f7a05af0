"""The device of this process: CUDA where there is one, else the CPU, which megatron-core is made to take for one.

`install_device()` is called once, before the first `import megatron.core` (by `megatron.training.preload` and by
`pretrain()`). Where CUDA can be used it does nothing at all. Where it cannot, it puts the CPU behind the parts of
`torch.cuda` that megatron-core calls, each named in `_SHIMS` with what breaks without it. No other module of the
project knows that there is a shim. Source: measured on megatron-core 0.16.1, part by part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")
_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "randperm", "as_tensor"),
    *("linspace", "zeros_like", "ones_like", "empty_like", "full_like"),
)
_installed = False


def on_cuda() -> bool:
    """Whether training runs on CUDA devices (decided by what torch can use)."""
    return torch.cuda.is_available() if not _installed else False


def install_device() -> None:
    """Makes megatron-core's `torch.cuda` calls mean this machine's device. Idempotent; absent where CUDA is."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    for shim in _SHIMS:
        shim()
    _installed = True


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class CpuEvent:
    """Stands for `torch.cuda.Event`: the CPU has done all that was asked of it, at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """True: nothing is ever outstanding."""
        return True

    def elapsed_time(self, _: CpuEvent) -> float:
        """0.0 milliseconds: two events on a device without queues have no distance."""
        return 0.0


class CpuStream:
    """Stands for `torch.cuda.Stream`: the CPU has one order of execution, so all streams are equal."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """An event that has happened."""
        return event or CpuEvent()

    def wait_stream(self, _: CpuStream) -> None: ...

    def wait_event(self, _: CpuEvent) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """True: nothing is ever outstanding."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return hash(CpuStream)


class _OneGenerator(tuple):  # type: ignore[type-arg]
    """`torch.cuda.default_generators`, indexable by the CPU device as well as by a number."""

    def __getitem__(self, _: object) -> torch.Generator:  # type: ignore[override]
        return torch.default_generator


def _shim_current_device() -> None:
    """Without it: tensor_parallel/random.py and some 30 more sites ask CUDA for a device and raise."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]
    torch.cuda.set_device = lambda _device: None  # type: ignore[assignment]
    torch.cuda.device_count = lambda: 1


def _shim_synchronize() -> None:
    """Without it: batched pipeline sends raise in p2p_communication.py."""
    torch.cuda.synchronize = lambda device=None: None


def _shim_random() -> None:
    """Without it: the RNG tracker raises. The CPU's default generator is the device's generator."""
    generator = torch.default_generator

    def get_rng_state(device: object = "cuda") -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(state: torch.Tensor, device: object = "cuda") -> None:
        generator.set_state(state)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(seed)

    torch.cuda.default_generators = _OneGenerator((generator,))
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state  # type: ignore[attr-defined]
        module.manual_seed, module.manual_seed_all = manual_seed, manual_seed  # type: ignore[attr-defined]


def _shim_lazy_call() -> None:
    """Without it nothing raises and results are silently wrong: RNG states are never put back."""
    torch.cuda._lazy_call = lambda callback, **_: callback()
    torch.cuda._lazy_init = lambda: None


def _shim_factories() -> None:
    """Without it: optimizer.py and others make tensors on `device="cuda"` and raise."""

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            return factory(*args, **kwargs)

        return make

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _shim_moves() -> None:
    """Without it: `.cuda()`, `.to("cuda")` and `pin_memory()` raise in language_module.py and the data path."""
    original_to = torch.Tensor.to

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _names_cuda(args[0]):
            args = (CPU, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original_to(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, _device=None: self  # type: ignore[method-assign, assignment]


def _shim_type_names() -> None:
    """Without it: distrib_optimizer.py compares `Tensor.type()` with `torch.cuda.*Tensor` and refuses parameters."""
    original_type = torch.Tensor.type

    @functools.wraps(original_type)
    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        name = original_type(self)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]


def _shim_streams() -> None:
    """Without it: overlap, the MoE all-to-all dispatcher and NVTX ranges raise."""

    @contextlib.contextmanager
    def stream_context(_stream: CpuStream | None) -> Iterator[None]:
        yield

    torch.cuda.Stream, torch.cuda.Event = CpuStream, CpuEvent  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda _device=None: CpuStream()  # type: ignore[assignment, return-value]
    torch.cuda.default_stream = lambda _device=None: CpuStream()  # type: ignore[assignment, return-value]
    torch.cuda.stream = stream_context  # type: ignore[assignment]
    torch.cuda.set_stream = lambda _stream: None  # type: ignore[assignment]
    torch.cuda.nvtx.range_push = lambda _message: 0
    torch.cuda.nvtx.range_pop = lambda: 0


def _shim_compile() -> None:
    """Without it: megatron-core's fused functions ask torch.compile for CUDA properties at their first call, and its
    import costs every spawner a second. Uncompiled they compute the same.
    """

    def uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
        return function if function is not None else lambda decorated: decorated

    torch.compile = uncompiled  # type: ignore[assignment]


_SHIMS: tuple[Callable[[], None], ...] = (
    _shim_current_device,
    _shim_synchronize,
    _shim_random,
    _shim_lazy_call,
    _shim_factories,
    _shim_moves,
    _shim_type_names,
    _shim_streams,
    _shim_compile,
)
