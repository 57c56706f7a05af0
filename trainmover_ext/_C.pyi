"""Types of the extension: csrc/torch/bindings.cc and communicator_object.cc."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy.typing as npt
import torch

Memory: TypeAlias = torch.Tensor | npt.NDArray[Any] | bytearray | memoryview
ReadOnlyMemory: TypeAlias = Memory | bytes

class FlightRecord(TypedDict):
    record_id: int
    communicator: str
    operation: str
    peer: int
    point_to_point: bool
    sequence: int
    input_bytes: int
    output_bytes: int
    dtype: str
    element_bytes: int
    generation: int
    timeout_ms: int
    created_ns: int
    started_ns: int
    ended_ns: int
    state: str

class CommunicatorStats(TypedDict):
    name: str
    size: int
    rank: int
    operations: int
    links: int
    bytes_sent: int
    bytes_received: int
    waits: int
    sleeps: int
    wait_us: int

class Settings:
    bind_address: str
    machine_id: str
    peer_timeout_ms: int
    connect_timeout_ms: int
    use_shared_memory: bool
    use_cross_memory: bool
    local_ranks: int
    flight_recorder_path: str
    flight_recorder_entries: int
    def __init__(self) -> None: ...

class Endpoint:
    incarnation: int
    machine_id: str
    address: str
    socket: str
    pid: int
    def __init__(self) -> None: ...

class Runtime:
    def __init__(self, global_rank: int, job_id: str, token: str, settings: Settings, isolated: bool) -> None: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def isolated(self) -> bool: ...
    def create_backend(self, name: str, global_ranks: Sequence[int], timeout_ms: int, world: bool) -> Any: ...
    def set_isolated(self, isolated: bool) -> None: ...
    def endpoint(self) -> Endpoint: ...
    def add_endpoints(self, endpoints: Mapping[int, Endpoint]) -> None: ...
    def knows(self, global_rank: int) -> bool: ...
    def generation(self) -> int: ...
    def aborted(self) -> bool: ...
    def abort_collectives(self, culprit: int, reason: str) -> None: ...
    def resume(self, generation: int) -> None: ...
    def memory_stats(self) -> dict[str, int]: ...
    def communicator_stats(self) -> list[CommunicatorStats]: ...
    def flight_records(self) -> list[FlightRecord]: ...
    def on_abort(self, callback: Callable[[], None]) -> None: ...
    def shutdown(self) -> None: ...
    def ended(self) -> bool: ...

class Communicator:
    """Every call blocks and releases the GIL. `timeout_ms` 0: the communicator's own.

    `op`: sum, avg, product, min, max, band, bor or bxor. Parts are equal: one buffer is `size` times the other.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    def all_reduce(
        self, buffer: Memory, output: Memory | str | None = None, op: str | None = None, timeout_ms: int = 0
    ) -> None: ...
    def reduce_scatter(
        self, buffer: ReadOnlyMemory, output: Memory, op: str | None = None, timeout_ms: int = 0
    ) -> None: ...
    def all_gather(self, buffer: ReadOnlyMemory, output: Memory, timeout_ms: int = 0) -> None: ...
    def broadcast(self, buffer: Memory, root: int = 0, timeout_ms: int = 0) -> None: ...
    def reduce(
        self,
        buffer: ReadOnlyMemory,
        output: Memory | None = None,
        op: str | None = None,
        root: int = 0,
        timeout_ms: int = 0,
    ) -> None: ...
    def gather(
        self, buffer: ReadOnlyMemory, output: Memory | None = None, root: int = 0, timeout_ms: int = 0
    ) -> None: ...
    def scatter(self, buffer: ReadOnlyMemory | None, output: Memory, root: int = 0, timeout_ms: int = 0) -> None: ...
    def all_to_all(self, buffer: ReadOnlyMemory, output: Memory, timeout_ms: int = 0) -> None: ...
    def send(self, buffer: ReadOnlyMemory, to: int, tag: int = 0, timeout_ms: int = 0) -> None: ...
    def recv(self, buffer: Memory, source: int | None = None, tag: int = 0, timeout_ms: int = 0) -> int: ...
    def barrier(self, timeout_ms: int = 0) -> None: ...
    def close(self) -> None: ...

def open_communicator(
    type: type[Communicator],  # noqa: A002
    runtime: Runtime,
    name: str,
    global_ranks: Sequence[int],
    timeout_ms: int,
) -> Communicator: ...
def job_constants() -> str: ...
