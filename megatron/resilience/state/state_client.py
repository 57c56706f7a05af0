"""The joiner rank's side of a state transfer: receives into its own arenas, acknowledges, hears the verdict.

Called by the boundary hook of a rank that was built alone. A connection that breaks or carries damaged bytes is
replaced by another one, which goes on after the last whole chunk; what the leaver refuses is refused for good.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections.abc import Callable
from types import TracebackType

from megatron.resilience.state.checksum import checksum
from megatron.resilience.state.errors import LeaverStays, StateError, TransferError, TransferRefused, WireError
from megatron.resilience.state.state_server import job_digest
from megatron.resilience.state.state_session import ConnectionLostError
from megatron.resilience.state.transfer import (
    Cancelled,
    Patience,
    Transferable,
    TransferIdentity,
    TransferLimits,
    TransferReport,
    Verdict,
    chunks_of,
    never,
    split_address,
    tune,
)
from megatron.resilience.state.wire import (
    CHUNK_BYTES_MAX,
    NONCE_BYTES,
    REASON_CHARACTERS_MAX,
    Ack,
    ChunkHeader,
    Failed,
    Hello,
    MessageReader,
    MessageType,
    Signer,
    Welcome,
    decode,
    encode,
    read_challenge,
    read_chunk_header,
    total_digest,
)

_RETRY_S = 0.02
_STATE = frozenset({MessageType.CHUNK, MessageType.SMALL, MessageType.VERDICT})


class StateClient:
    """Takes over one rank's state. Not to be shared between threads."""

    def __init__(
        self,
        identity: TransferIdentity,
        address: str,
        *,
        limits: TransferLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._address = split_address(address)
        self._limits = limits or TransferLimits()
        self._clock = clock
        self._connection: socket.socket | None = None
        self._signer: Signer | None = None
        self._reader = MessageReader()
        self._layout = b""
        self._memory: list[memoryview] = []
        self._chunks: list[memoryview] = []
        self._checksums: list[int] = []
        self._small: bytes | None = None
        self._verdict: Verdict | None = None
        self._connections = self._bytes = 0
        self._unreachable_since_s: float | None = None
        self._last_error = "nothing was tried"

    def connect(self, *, cancelled: Cancelled = never) -> None:
        """Opens the connection ahead of time; the leaver looks at it at the boundary. Optional, saves a round trip."""
        patience = self._patience("connect", self._limits.reconnect_s, cancelled)
        while self._connection is None:
            self._try_to_connect(patience)

    def receive_state(self, state: Transferable, *, cancelled: Cancelled = never) -> TransferReport:
        """Receives into `state.memory()`, restores the small state, acknowledges both.

        Raises LeaverStays when the leaver says STAY instead, TransferRefused when it does not take this rank or this
        rank cannot use what came, TransferTimeout, TransferCancelled. After each of them the state is not to be used.
        """
        patience = self._patience("receive state", self._limits.total_s, cancelled)
        self._layout, self._memory = state.layout_digest(), state.memory()
        while self._small is None:
            if self._is_open(patience):
                self._attempt(patience, lambda: self._take_state(patience))
        try:
            state.restore(self._small)
        except StateError as error:
            self._say(patience, MessageType.FAILED, encode(Failed(reason=str(error)[:REASON_CHARACTERS_MAX])))
            raise TransferRefused(f"the leaver's state does not fit this rank: {error}") from error
        self._attempt(patience, lambda: self._acknowledge(patience))
        return TransferReport(bytes_moved=self._bytes, duration_s=patience.elapsed_s, connections=self._connections)

    def receive_verdict(self, *, cancelled: Cancelled = never) -> Verdict:
        """Waits for the leaver's decision, over a new connection if the old one breaks. Raises as `receive_state`."""
        patience = self._patience("receive verdict", self._limits.total_s, cancelled)
        while self._verdict is None:
            if self._is_open(patience):
                self._attempt(patience, lambda: self._take_verdict(patience))
        return self._verdict

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._signer = None

    def __enter__(self) -> StateClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _patience(self, what: str, seconds: float, cancelled: Cancelled) -> Patience:
        where = f"{what} of global rank {self._identity.global_rank}, generation {self._identity.generation}"
        return Patience(what=where, seconds=seconds, cancelled=cancelled, clock=self._clock)

    def _attempt(self, patience: Patience, action: Callable[[], None]) -> None:
        """Runs `action`; a connection that proves useless is closed, for the next attempt to replace."""
        try:
            action()
        except (ConnectionLostError, WireError) as error:
            self._last_error = str(error)
            self.close()
            select.select([], [], [], min(patience.next_wait_s(), _RETRY_S))

    def _is_open(self, patience: Patience) -> bool:
        """Whether there is a connection on which the leaver has welcomed this rank; makes a step towards one."""
        if self._connection is None:
            self._try_to_connect(patience)
        if self._connection is not None and self._signer is None:
            self._attempt(patience, lambda: self._greet(patience))
        return self._signer is not None

    def _try_to_connect(self, patience: Patience) -> None:
        wait_s = patience.next_wait_s()
        now_s = self._clock()
        if self._unreachable_since_s is None:
            self._unreachable_since_s = now_s
        elif now_s - self._unreachable_since_s > self._limits.reconnect_s:
            raise TransferError(
                f"{patience.what}: the leaver rank at {self._address} cannot be reached ({self._last_error}); its "
                "process or machine is gone, or the way there is cut"
            )
        try:
            connection = socket.create_connection(self._address, timeout=max(wait_s, 0.5))
        except OSError as error:
            self._last_error = str(error)
            select.select([], [], [], wait_s)
            return
        tune(connection)
        self._connection, self._unreachable_since_s = connection, None

    def _greet(self, patience: Patience) -> None:
        """Challenge, HELLO, WELCOME. Before the boundary each may take until then."""
        self._reader = MessageReader(frozenset({MessageType.CHALLENGE}))
        _, body = self._read_message(patience, stall_s=None)
        nonce = secrets.token_bytes(NONCE_BYTES)
        signer = Signer(token=self._identity.token, challenge_nonce=read_challenge(body), hello_nonce=nonce)
        hello = Hello(
            job=job_digest(self._identity.job_id),
            generation=self._identity.generation,
            global_rank=self._identity.global_rank,
            layout=self._layout,
            chunks_held=len(self._checksums),
            nonce=nonce,
        )
        self._write(patience, signer.seal(MessageType.HELLO, encode(hello)))
        self._reader = MessageReader(frozenset({MessageType.WELCOME}))
        is_first = self._connections == 0
        kind, sealed = self._read_message(patience, stall_s=None if is_first else self._limits.handshake_s)
        welcome = decode(signer.open(kind, sealed), Welcome)
        if welcome.reason:
            self.close()
            raise TransferRefused(f"the leaver rank: {welcome.reason}")
        if welcome.chunk_bytes:
            self._cut(welcome)
        self._signer = signer
        self._reader = MessageReader(_STATE)
        self._connections += 1

    def _cut(self, welcome: Welcome) -> None:
        own_bytes = sum(len(part) for part in self._memory)
        if welcome.total_bytes != own_bytes or not 1 <= welcome.chunk_bytes <= CHUNK_BYTES_MAX:
            raise TransferRefused(
                f"found a state of {welcome.total_bytes} bytes in chunks of {welcome.chunk_bytes}, expected "
                f"{own_bytes} bytes; do both ranks run the same release?"
            )
        self._chunks = chunks_of(self._memory, welcome.chunk_bytes)

    def _take_state(self, patience: Patience) -> None:
        while self._small is None:
            kind, body = self._read_message(patience, stall_s=self._limits.stall_s)
            if kind is MessageType.CHUNK:
                self._take_chunk(patience, read_chunk_header(body))
                continue
            assert self._signer is not None
            opened = self._signer.open(kind, body)
            if kind is MessageType.VERDICT:
                self._hear(patience, opened)
                raise LeaverStays(f"{patience.what}: the leaver stays; nothing of its state may be used")
            if len(self._checksums) != len(self._chunks):
                raise WireError(f"found the small state after {len(self._checksums)} of {len(self._chunks)} chunks")
            self._small = opened
            self._bytes += len(opened)

    def _take_chunk(self, patience: Patience, header: ChunkHeader) -> None:
        index = len(self._checksums)
        if header.index != index or index >= len(self._chunks) or header.length != len(self._chunks[index]):
            raise WireError(f"found chunk {header.index} of {header.length} bytes, expected chunk {index}")
        self._fill(patience, self._chunks[index])
        if checksum(self._chunks[index]) != header.checksum:
            raise WireError(f"chunk {index} was damaged on its way")
        self._checksums.append(header.checksum)
        self._bytes += header.length

    def _acknowledge(self, patience: Patience) -> None:
        assert self._small is not None
        digest = total_digest(self._layout, self._checksums, self._small)
        self._say(patience, MessageType.ACK, encode(Ack(digest=digest)))

    def _take_verdict(self, patience: Patience) -> None:
        """Over a new connection the leaver first sends the small state again and awaits that it is acknowledged."""
        while self._verdict is None:
            kind, body = self._read_message(patience, stall_s=None)
            if kind is MessageType.CHUNK:
                raise WireError("found a chunk after all of them")
            assert self._signer is not None
            opened = self._signer.open(kind, body)
            if kind is MessageType.SMALL:
                self._acknowledge(patience)
            else:
                self._hear(patience, opened)

    def _hear(self, patience: Patience, body: bytes) -> None:
        text = decode(body, str)
        verdict = next((verdict for verdict in Verdict if verdict.value == text), None)
        if verdict is None or (verdict is Verdict.LEAVE and self._small is None):
            raise WireError(f"found verdict {text!r} when {'nothing' if self._small is None else 'all'} was received")
        self._verdict = verdict
        try:
            self._say(patience, MessageType.GOT, b"")
        except ConnectionLostError:
            return  # the leaver asks nothing of it but to be told
        finally:
            self.close()

    def _say(self, patience: Patience, kind: MessageType, body: bytes) -> None:
        if self._signer is not None:
            self._write(patience, self._signer.seal(kind, body))

    def _write(self, patience: Patience, data: bytes) -> None:
        view = memoryview(data)
        while view:
            assert self._connection is not None
            try:
                view = view[self._connection.send(view) :]
            except (BlockingIOError, InterruptedError):
                select.select([], [self._connection], [], patience.next_wait_s())
            except OSError as error:
                raise ConnectionLostError(str(error)) from error

    def _read_message(self, patience: Patience, *, stall_s: float | None) -> tuple[MessageType, bytes]:
        buffer = bytearray(1 << 16)
        while True:
            part = memoryview(buffer)[: self._reader.wanted()]
            limit_s = self._limits.handshake_s if self._reader.has_begun else stall_s
            message = self._reader.feed(part[: self._read_some(patience, part, limit_s)])
            if message is not None:
                return message

    def _fill(self, patience: Patience, memory: memoryview) -> None:
        while memory:
            memory = memory[self._read_some(patience, memory, self._limits.stall_s) :]

    def _read_some(self, patience: Patience, memory: memoryview, stall_s: float | None) -> int:
        """At least one byte. ConnectionLostError at the end of the stream, or when nothing comes for `stall_s`."""
        assert self._connection is not None
        started_s = self._clock()
        while True:
            try:
                count = self._connection.recv_into(memory)
            except (BlockingIOError, InterruptedError):
                if stall_s is not None and self._clock() - started_s > stall_s:
                    raise ConnectionLostError(f"nothing came for {stall_s:g} s") from None
                select.select([self._connection], [], [], patience.next_wait_s())
                continue
            except OSError as error:
                raise ConnectionLostError(str(error)) from error
            if not count:
                raise ConnectionLostError("the leaver closed the connection")
            return count
