"""A user's call of the controller: one command, its answers. Used by the commands of `trainmover`; blocks, bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from megatron.resilience.controller import wire
from megatron.resilience.controller.directory import DirectoryError, resolve_address
from megatron.resilience.protocol.messages import Party, UserAnswer, UserCommand, decode, encode

_RETRY_S = 0.2
_PERMANENT = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)


class ClientError(Exception):
    """No answer: the controller cannot be reached, or refuses the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerClient:
    """Where a controller is, and what it takes to call it. `where` is read anew for each try: it may move."""

    where: str
    token: str
    tls: wire.TlsFiles | None = None

    def ask(
        self,
        command: UserCommand,
        *,
        patience_s: float,
        retry: Callable[[], None],
        answer_s: float | None = None,
    ) -> Iterator[UserAnswer]:
        """Yields answers until the last, which must come within `answer_s` if that is given.

        A controller that cannot be reached, or that dies on the way, is asked again for `patience_s` after the last
        sign of life; `retry()` is called before. A command may so be taken twice: it bears an id of its own.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            has_answered = False
            try:
                for payload in self._call(encode(command), answer_s):
                    has_answered = True
                    answer: UserAnswer = decode(payload, sender=Party.CONTROLLER, receiver=Party.USER)
                    yield answer
                return
            except DirectoryError as error:
                failure = str(error)
            except grpc.RpcError as error:
                if error.code() in _PERMANENT:
                    raise ClientError(f"the controller refuses: {error.details()}") from error
                failure = f"no controller at {self.where}: {error.details()}"
            if has_answered:  # it was there until now, however long it had nothing to say
                deadline_s = time.monotonic() + patience_s
            if time.monotonic() >= deadline_s:
                raise ClientError(
                    f"{failure}; expected an answer in {patience_s:g} s; if the job still runs, it trains on without"
                )
            retry()
            time.sleep(_RETRY_S)

    def _call(self, payload: bytes, answer_s: float | None) -> Iterator[bytes]:
        address = resolve_address(self.where)
        if self.tls is None:
            channel = grpc.insecure_channel(address, options=wire.OPTIONS)
        else:
            channel = grpc.secure_channel(address, wire.channel_credentials(self.tls), options=wire.OPTIONS)
        with channel:
            call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{wire.SERVICE}/{wire.ASK}")
            yield from call(payload, metadata=wire.metadata(self.token), timeout=answer_s)
