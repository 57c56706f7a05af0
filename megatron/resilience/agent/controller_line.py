"""An agent's stream to its controller: made again, with growing pauses, for as long as the agent lives.

The address is read anew for each try, so a controller that comes back at another port is found. What is said while
there is no stream is not kept here: after each new one the agent's core says again all that matters.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from megatron.resilience.controller import wire
from megatron.resilience.controller.directory import DirectoryError, resolve_address
from megatron.resilience.protocol.messages import MessageError, Party, ToAgent, ToController, decode, encode

PAUSE_S_MIN = 0.05
PAUSE_S_MAX = 1.0
_CONNECT_S = 5.0
_QUEUED_MAX = 65_536
_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineConfig:
    """Where the controller is, and what it takes to call it."""

    where: str
    token: str
    tls: wire.TlsFiles | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCallbacks:
    """What the agent does when the line stands, speaks, or is lost. `refused`: why the controller won't have it."""

    connected: Callable[[], None]
    said: Callable[[ToAgent], None]
    disconnected: Callable[[], None]
    refused: Callable[[str], None]
    away: Callable[[str], None]


class ControllerLine:
    """See the module. `run()` is a task of the agent's event loop."""

    def __init__(self, config: LineConfig, callbacks: LineCallbacks) -> None:
        self._config = config
        self._callbacks = callbacks
        self._outgoing: asyncio.Queue[ToController | None] | None = None
        self._is_over = False
        self._is_patient = False
        """Whether the present stream was ended by us: the next may as well wait."""

    def say(self, message: ToController) -> None:
        """Over the present stream; nothing happens if there is none. A full queue ends the stream."""
        if self._outgoing is None:
            return
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self.hang(for_good=False)

    def hang(self, *, for_good: bool) -> None:
        """Ends the present stream after what was said; connects again unless `for_good`."""
        self._is_over = self._is_over or for_good
        self._is_patient = True
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None:
            while outgoing.full():
                outgoing.get_nowait()
            outgoing.put_nowait(None)

    async def run(self) -> None:
        """Keeps a stream, until `hang(for_good=True)`."""
        pause_s = PAUSE_S_MIN
        while not self._is_over:
            self._is_patient = False
            try:
                if await self._try():
                    pause_s = PAUSE_S_MIN
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    self._callbacks.refused(error.details() or str(error.code()))
                    pause_s = PAUSE_S_MAX
                else:
                    self._callbacks.away(error.details() or str(error.code()))
            except (DirectoryError, wire.TlsError, MessageError, TimeoutError, OSError) as error:
                self._callbacks.away(str(error) or "no answer")
            if not self._is_over:
                pause_s = PAUSE_S_MAX if self._is_patient else pause_s
                await asyncio.sleep(pause_s)
                pause_s = min(PAUSE_S_MAX, 2 * pause_s)

    async def _try(self) -> bool:
        """One stream from beginning to end; True if the controller has said something over it."""
        address = resolve_address(self._config.where)
        options = (*wire.OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        if self._config.tls is None:
            channel = grpc.aio.insecure_channel(address, options=options)
        else:
            channel = grpc.aio.secure_channel(address, wire.channel_credentials(self._config.tls), options=options)
        async with channel:
            await asyncio.wait_for(_connect(channel), _CONNECT_S)
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/{wire.SERVICE}/{wire.ATTACH}")(
                metadata=grpc.aio.Metadata(*wire.metadata(self._config.token))
            )
            return await self._speak(call)

    async def _speak(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> bool:
        outgoing: asyncio.Queue[ToController | None] = asyncio.Queue(_QUEUED_MAX)
        self._outgoing = outgoing
        has_spoken = False
        self._callbacks.connected()
        writer = asyncio.ensure_future(_write(call, outgoing))
        try:
            async for payload in call:
                has_spoken = True
                self._callbacks.said(decode(payload, sender=Party.CONTROLLER, receiver=Party.AGENT))
        finally:
            self._outgoing = None
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await writer
            self._callbacks.disconnected()
        return has_spoken


async def _connect(channel: grpc.aio.Channel) -> None:
    """Waits until `channel` stands. One try: the address may have changed before the next. Raises OSError."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise OSError("nobody answers there")
        await channel.wait_for_state_change(state)
        state = channel.get_state()


async def _write(call: grpc.aio.StreamStreamCall[bytes, bytes], outgoing: asyncio.Queue[ToController | None]) -> None:
    while (message := await outgoing.get()) is not None:
        await call.write(encode(message))
    await call.done_writing()
