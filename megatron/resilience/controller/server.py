"""The gRPC server round a `Controller`: one stream an agent, one call a user's command, all with the job's token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from megatron.resilience.controller import wire
from megatron.resilience.controller.shell import Controller, Outbox
from megatron.resilience.protocol.messages import (
    Finished,
    IncidentsAnswer,
    Message,
    MessageError,
    Party,
    Refused,
    StatusAnswer,
    decode,
    encode,
)

_LOG = logging.getLogger(__name__)
_LAST_ANSWERS = (Refused, Finished, StatusAnswer, IncidentsAnswer)
_STOP_GRACE_S = 1.0

Context = grpc.aio.ServicerContext[bytes, bytes]


class ControllerServer:
    """Listens, checks who calls, and hands messages to the controller and back."""

    def __init__(self, controller: Controller, *, token: str) -> None:
        self._controller = controller
        self._token = token
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str, tls: wire.TlsFiles | None) -> int:
        """Listens on `address` (host:port, port 0 for a free one); returns the port. Raises RuntimeError, TlsError."""
        self._server = grpc.aio.server(options=wire.OPTIONS)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            wire.ATTACH: grpc.stream_stream_rpc_method_handler(self._attach),
            wire.ASK: grpc.unary_stream_rpc_method_handler(self._ask),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
        if tls is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, wire.server_credentials(tls))
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Ends all calls, within a second."""
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)

    async def _check(self, context: Context) -> None:
        refused = wire.refusal(context.invocation_metadata() or (), self._token)
        if refused is not None:
            _LOG.warning("refused a call from %s: %s", context.peer(), refused[1])
            await context.abort(*refused)

    # ------------------------------------------------------------------ agents

    async def _attach(self, requests: AsyncIterator[bytes], context: Context) -> None:
        await self._check(context)
        connection, outbox = self._controller.agent_came()
        _LOG.info("agent connection %d from %s", connection, context.peer())
        reader = asyncio.ensure_future(self._read(connection, requests, outbox))
        try:
            while (message := await outbox.get()) is not None:
                await context.write(encode(message))
            if reader.done() and (error := reader.exception()) is not None:
                _LOG.warning("cut off the agent at %s: %s", context.peer(), error)
                is_theirs = isinstance(error, MessageError)
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT if is_theirs else grpc.StatusCode.INTERNAL, str(error)
                )
        finally:
            reader.cancel()
            _LOG.info("agent connection %d is over", connection)
            self._controller.agent_gone(connection)

    async def _read(self, connection: int, requests: AsyncIterator[bytes], outbox: Outbox) -> None:
        try:
            async for payload in requests:
                self._controller.agent_said(connection, decode(payload, sender=Party.AGENT, receiver=Party.CONTROLLER))
        finally:
            outbox.close()

    # ------------------------------------------------------------------ users

    async def _ask(self, payload: bytes, context: Context) -> AsyncIterator[bytes]:
        await self._check(context)
        try:
            command: Any = decode(payload, sender=Party.USER, receiver=Party.CONTROLLER)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        client, outbox = self._controller.user_asked(command)
        try:
            message: Message | None = None
            while not isinstance(message, _LAST_ANSWERS) and (message := await outbox.get()) is not None:
                yield encode(message)
        finally:
            self._controller.user_gone(client)
