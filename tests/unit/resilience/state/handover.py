"""What the tests of a transfer hand over: plain memory, in place of a rank's; and a relay that harms what passes it."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.resilience.state.errors import StateError
from megatron.resilience.state.transfer import TransferIdentity, TransferLimits, join_address

SIZES = (700, 1, 64)
IDENTITY = TransferIdentity(job_id="job", token="token", generation=2, global_rank=3)
LIMITS = TransferLimits(total_s=20.0, stall_s=5.0, handshake_s=2.0, reconnect_s=5.0, chunk_bytes=256)


class Memory:
    """A state of some bytes; `filled` or to be filled."""

    def __init__(self, sizes: tuple[int, ...] = SIZES, *, filled: bool, small: bytes = b"small state") -> None:
        generator = np.random.default_rng(7)
        self.parts = [bytearray(generator.bytes(size) if filled else size) for size in sizes]
        self.small = small if filled else b""
        self.fits = True

    def layout_digest(self) -> bytes:
        return hashlib.sha256(repr([len(part) for part in self.parts]).encode()).digest()

    def memory(self) -> list[memoryview]:
        return [memoryview(part) for part in self.parts]

    def capture(self) -> bytes:
        return self.small

    def restore(self, payload: bytes) -> None:
        if not self.fits:
            raise StateError("it does not fit")
        self.small = payload

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Memory) and self.parts == other.parts and self.small == other.small

    __hash__ = None  # type: ignore[assignment]


class Elsewhere(threading.Thread):
    """Runs `action` in another thread; `result()` gives what it returned or raises what it raised."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._action = action
        self._value: Any = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._action()
        except Exception as error:  # noqa: BLE001  (raised again where it is looked at)
            self._error = error

    def result(self, limit_s: float = 30.0) -> Any:
        self.join(limit_s)
        assert not self.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._value


@dataclass
class Relay:
    """Passes connections on to `target`; what the target says on connection `number` goes through `harm[number]`.

    A harm gets (offset in the stream, bytes) and returns the bytes to pass on, fewer for a cut right there.
    """

    target: tuple[str, int]
    harm: dict[int, Callable[[int, bytes], bytes]]
    seen: int = 0
    passed: dict[int, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(0.05)
            stop = threading.Event()
            thread = threading.Thread(target=self._accept, args=(listener, stop), daemon=True)
            thread.start()
            try:
                yield join_address("127.0.0.1", listener.getsockname()[1])
            finally:
                stop.set()
                thread.join(5)

    def _accept(self, listener: socket.socket, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                near, _ = listener.accept()
            except TimeoutError:
                continue
            far = socket.create_connection(self.target)
            number, self.seen = self.seen, self.seen + 1
            threading.Thread(target=self._pump, args=(near, far, None, number), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, self.harm.get(number), number), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, harm: Any, number: int) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                passed = harm(offset, data) if harm else data
                sink.sendall(passed)
                offset += len(data)
                if harm:
                    self.passed[number] = offset
                if len(passed) < len(data):
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def cut_at(place: int) -> Callable[[int, bytes], bytes]:
    """Ends the connection when `place` bytes have passed."""
    return lambda offset, data: data[: max(0, place - offset)]


def flip_at(place: int) -> Callable[[int, bytes], bytes]:
    """Changes one bit of the byte at `place`."""

    def harm(offset: int, data: bytes) -> bytes:
        if not offset <= place < offset + len(data):
            return data
        changed = bytearray(data)
        changed[place - offset] ^= 0x10
        return bytes(changed)

    return harm
