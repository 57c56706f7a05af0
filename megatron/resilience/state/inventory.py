"""What a rank owns between two iterations, in the two forms in which it travels: arenas and a small message.

`take_inventory()` is called once on a rank whose machine may be replaced, after its model and optimizer are built and
loaded, and on a rank that was built to take another's place. At the boundary the leaver sends `memory()` and
`capture()`, the joiner receives into `memory()` and calls `restore()`: state_server.py and state_client.py. Source:
paper section 5; what belongs to the state was found by measurement, see docs/state.md.

With parameters gathered late (overlap_param_gather), a rank's buffer holds other ranks' shards as of the iteration
before. They are sent as they are: the next forward pass gathers, on the joiner as it would have on the leaver.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.resilience.state.arenas import Arena, keep_in_arenas
from megatron.resilience.state.data_parallel_flags import check_nothing_outstanding
from megatron.resilience.state.errors import StateError
from megatron.resilience.state.small_state import (
    capture_small_state,
    check_small_state,
    decode_small_state,
    restore_small_state,
    structure_of,
)
from megatron.resilience.state.small_tensors import scratch_tensors


class Bookkeeping(Protocol):
    """Counters of the training loop: iteration, samples, what the next log line averages. The loop's own business."""

    def capture(self) -> dict[str, Any]:
        """Numbers, text, and lists and dicts of them."""

    def restore(self, values: dict[str, Any]) -> None:
        """Takes over what another rank captured. Raises ValueError for names or values that it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The state of one rank. Made by `take_inventory`."""

    trainee: Any
    bookkeeping: Bookkeeping
    arenas: tuple[Arena, ...]

    @property
    def total_bytes(self) -> int:
        """Of all arenas together."""
        return sum(arena.memory.numel() * arena.memory.element_size() for arena in self.arenas)

    def scratch(self) -> list[torch.Tensor]:
        """Tensors of the micro-batch that came last, which some modules hold on to; no state."""
        return list(scratch_tensors(self.trainee))

    def layout_digest(self) -> bytes:
        """32 bytes that are equal on two ranks whose arenas have the same names, types and sizes, and small states the
        same parts.
        """
        digest = hashlib.sha256(f"{structure_of(self.trainee)}\n".encode())
        for arena in self.arenas:
            digest.update(f"{arena.name} {arena.memory.dtype} {arena.memory.numel()}\n".encode())
            digest.update(",".join(f"{offset}:{tensor.numel()}" for tensor, offset in arena.members).encode())
        return digest.digest()

    def memory(self) -> list[memoryview]:
        """The bytes of the arenas, in order, to be read and written where they lie."""
        self.verify()
        return [_bytes_of(arena) for arena in self.arenas if arena.memory.numel()]

    def capture(self) -> bytes:
        """The small state, at most SMALL_BYTES_MAX. Raises StateError when this is no boundary between iterations."""
        for chunk in self.trainee.model:
            check_nothing_outstanding(chunk)
        return capture_small_state(self.trainee, self.bookkeeping.capture())

    def restore(self, payload: bytes) -> None:
        """Takes over the small state of another rank. Raises StateError for what does not fit."""
        state = decode_small_state(payload)
        check_small_state(state, self.trainee)
        try:
            self.bookkeeping.restore(state.bookkeeping)
        except ValueError as error:
            raise StateError(f"bookkeeping: {error}") from error
        restore_small_state(state, self.trainee)

    def verify(self) -> None:
        """Raises StateError when something has moved out of its arena since the inventory was taken."""
        for arena in self.arenas:
            strays = arena.strays()
            if strays:
                raise StateError(
                    f"{arena.name}: {strays} of {len(arena.members)} tensors lie elsewhere; something replaced them "
                    "after the inventory was taken (such as loading a checkpoint): take it afterwards"
                )


def take_inventory(trainee: Any, bookkeeping: Bookkeeping) -> Inventory:
    """Brings the state of `trainee` into arenas, with what its first step would make, and lists it."""
    with torch.no_grad():
        return Inventory(trainee=trainee, bookkeeping=bookkeeping, arenas=keep_in_arenas(trainee))


def _bytes_of(arena: Arena) -> memoryview:
    if arena.memory.device.type != "cpu":
        raise StateError(f"{arena.name} is on {arena.memory.device}; this build moves the memory of CPU ranks only")
    return memoryview(arena.memory.detach().view(torch.uint8).numpy().data)
