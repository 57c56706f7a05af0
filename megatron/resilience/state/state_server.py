"""The leaver rank's side of a state transfer. Called by the boundary hook: listen, send state, send the verdict.

Nothing runs in the background: `send_state`, `send_verdict` and, before the boundary, `tend` look at connections, in
the calling thread. Strangers are answered with a challenge, must present themselves in time and are few at once; none
of them can hold up the joiner, whose connection is kept once it has presented itself. A joiner rank that lost its
connection comes again and says which chunks it has.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from types import TracebackType

from megatron.resilience.state.errors import TransferError, TransferRefused, TransferTimeout, WireError
from megatron.resilience.state.state_session import Cargo, ConnectionLostError, Greeting, Session
from megatron.resilience.state.transfer import (
    Cancelled,
    Patience,
    Transferable,
    TransferIdentity,
    TransferLimits,
    TransferReport,
    Verdict,
    chunks_of,
    close_in_children,
    join_address,
    never,
    tune,
)
from megatron.resilience.state.wire import (
    NONCE_BYTES,
    REASON_CHARACTERS_MAX,
    Ack,
    Failed,
    Hello,
    MessageType,
    Signer,
    Welcome,
    challenge,
    encode,
    total_digest,
)

_GREETINGS_MAX = 16
_BACKLOG = 64


class StateServer:
    """Gives one rank's state to the rank that takes its place. Not to be shared between threads."""

    def __init__(
        self,
        identity: TransferIdentity,
        *,
        limits: TransferLimits | None = None,
        layout: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`layout`: that of the state, where it is known before the boundary: another one is refused before, too."""
        self._identity = identity
        self._layout = layout
        self._limits = limits or TransferLimits()
        self._clock = clock
        self._cargo = Cargo(layout=b"")
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._greetings: dict[socket.socket, Greeting] = {}
        self._early: tuple[Greeting, Hello] | None = None
        """The joiner rank, which has presented itself and waits for the boundary."""
        self._session: Session | None = None
        self._failure: TransferError | None = None
        self._verdict: Verdict | None = None
        self._is_acknowledged = self._is_confirmed = False
        self._connections = self._bytes_before = 0
        self._furthest, self._furthest_s = -1, 0.0
        """The greatest number of chunks that were begun, and since when; -1 before the joiner rank came."""

    def listen(self, bind_address: str = "127.0.0.1") -> str:
        """Starts to take connections; gives the address for the joiner rank."""
        family = socket.AF_INET6 if ":" in bind_address else socket.AF_INET
        self._listener = socket.create_server((bind_address, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        close_in_children(self._listener)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return join_address(bind_address, self._listener.getsockname()[1])

    def tend(self) -> None:
        """Between `listen` and the boundary, now and then: keeps the joiner rank, drops idle strangers. Never blocks.

        Otherwise strangers would fill the queue of connections, and the joiner rank found no way in.
        """
        if self._listener is None or self._is_due:
            return
        for is_last in (False, True):  # who has spoken is heard before the others are dropped for silence
            for _ in range(2 * _BACKLOG):
                ready = [key.fileobj for key, _ in self._selector.select(0)]
                if not is_last:
                    ready = [connection for connection in ready if connection is not self._listener]
                for connection in ready:
                    self._serve(connection)  # type: ignore[arg-type]
                if not ready:
                    break
            self._give_up_idle()

    def send_state(self, state: Transferable, *, cancelled: Cancelled = never) -> TransferReport:
        """Sends all of `state`; returns when the joiner rank has acknowledged the digest over it.

        `state` must not change meanwhile. Raises TransferTimeout, also when the state gets no further for long,
        TransferCancelled, or TransferRefused when the joiner rank cannot use it; STAY can be said after each of them.
        """
        patience = self._patience("send state", self._limits.total_s, cancelled)
        if self._cargo.layout or self._verdict is not None:
            raise TransferError("send state: it was begun before, or the verdict is given; make another server")
        self._cargo = Cargo(
            layout=state.layout_digest(),
            chunks=chunks_of(state.memory(), self._limits.chunk_bytes),
            chunk_bytes=self._limits.chunk_bytes,
            capture=state.capture,
        )
        self._furthest_s = self._clock()
        self._take_early()
        self._run(self._is_given, patience)
        sent = self._bytes_before + (self._session.bytes_sent if self._session else 0)
        return TransferReport(bytes_moved=sent, duration_s=patience.elapsed_s, connections=self._connections)

    def send_verdict(self, verdict: Verdict, *, within_s: float = 10.0, cancelled: Cancelled = never) -> bool:
        """Tells the joiner rank; True once it has said that it knows. False: not within `within_s` seconds.

        STAY may be said at any time, LEAVE only once the state is acknowledged. A verdict is never changed.
        """
        if verdict is Verdict.LEAVE and not self._is_acknowledged:
            raise TransferError("LEAVE before the joiner rank acknowledged the state; expected STAY")
        if self._verdict not in (None, verdict):
            raise TransferError(f"the verdict was {self._verdict}, and cannot become {verdict}")
        self._verdict = verdict
        self._failure = None
        self._take_early()
        if self._session is not None and not self._session.said_verdict:
            self._say_verdict(self._session)
        try:
            self._run(lambda: self._is_confirmed, self._patience("send verdict", within_s, cancelled))
        except (TransferTimeout, TransferRefused):
            return False
        return True

    def close(self) -> None:
        """Ends every connection and stops listening. Idempotent."""
        self._drop_session()
        self._drop_early()
        for greeting in list(self._greetings.values()):
            self._drop_greeting(greeting)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._selector.close()

    def __enter__(self) -> StateServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _patience(self, what: str, seconds: float, cancelled: Cancelled) -> Patience:
        if self._listener is None:
            raise TransferError(f"{what}: nothing listens; call listen() first, and not after close()")
        where = f"{what} of global rank {self._identity.global_rank}, generation {self._identity.generation}"
        return Patience(what=where, seconds=seconds, cancelled=cancelled, clock=self._clock)

    @property
    def _is_due(self) -> bool:
        """The boundary has come: who presents itself is answered."""
        return bool(self._cargo.layout) or self._verdict is not None

    def _run(self, is_done: Callable[[], bool], patience: Patience) -> None:
        while not is_done():
            wait_s = patience.next_wait_s()
            self._watch_session()
            for key, _ in self._selector.select(wait_s):
                self._serve(key.fileobj)  # type: ignore[arg-type]
            self._give_up_idle()
            if self._failure is not None:
                raise self._failure

    def _is_given(self) -> bool:
        """Whether the state is acknowledged. Raises TransferTimeout when it gets no further before all is sent."""
        session, now_s = self._session, self._clock()
        begun = -1 if session is None else session.next_chunk
        if begun > self._furthest:
            self._furthest, self._furthest_s = begun, now_s
        waits_for_answer = session is not None and not session.has_to_send
        if not (self._is_acknowledged or waits_for_answer or now_s - self._furthest_s <= self._limits.progress_s):
            raise TransferTimeout(
                f"send state of global rank {self._identity.global_rank}, generation {self._identity.generation}: no "
                f"progress for {self._limits.progress_s:g} s, {max(0, self._furthest)} of {len(self._cargo.chunks)} "
                "chunks were begun; is the joiner rank alive, and the way to it?"
            )
        return self._is_acknowledged

    def _watch_session(self) -> None:
        """Asks for room in the session's socket only when there is something to send."""
        if self._session is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._session.has_to_send else 0)
            self._selector.modify(self._session.connection, events)

    def _serve(self, connection: socket.socket) -> None:
        if connection is self._listener:
            self._accept()
        elif connection in self._greetings:
            self._greet(self._greetings[connection])
        elif self._early is not None and connection is self._early[0].connection:
            self._drop_early()  # it has nothing to say before it is welcomed: it is gone
        elif self._session is not None and connection is self._session.connection:
            try:
                self._session.send(self._clock())
                self._hear(self._session)
            except (ConnectionLostError, WireError):
                self._drop_session()  # it comes again, or the limit tells

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it left again
        if len(self._greetings) >= _GREETINGS_MAX:
            connection.close()
            return
        tune(connection)
        signer = Signer(token=self._identity.token, challenge_nonce=secrets.token_bytes(NONCE_BYTES))
        greeting = Greeting(connection=connection, signer=signer, opened_s=self._clock())
        self._greetings[connection] = greeting
        self._selector.register(connection, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            connection.send(challenge(signer.challenge_nonce))

    def _greet(self, greeting: Greeting) -> None:
        try:
            hello = greeting.go_on()
        except (WireError, ConnectionLostError):
            self._drop_greeting(greeting)
            return
        if hello is None:
            return
        if self._is_due or self._reason_against(hello):
            self._answer(greeting, hello)
            return
        self._drop_early()
        del self._greetings[greeting.connection]
        self._early = (greeting, hello)

    def _take_early(self) -> None:
        """Answers the joiner rank that waits, once the boundary has come."""
        if self._early is not None:
            greeting, hello = self._early
            self._early = None
            self._greetings[greeting.connection] = greeting
            self._answer(greeting, hello)

    def _answer(self, greeting: Greeting, hello: Hello) -> None:
        reason = self._reason_against(hello)
        welcome = Welcome(reason=reason, total_bytes=self._cargo.total_bytes, chunk_bytes=self._cargo.chunk_bytes)
        if reason:
            with contextlib.suppress(OSError):
                greeting.connection.send(greeting.signer.seal(MessageType.WELCOME, encode(welcome)))
            self._drop_greeting(greeting)
            return
        self._drop_session()
        del self._greetings[greeting.connection]
        self._session = Session(
            connection=greeting.connection,
            signer=greeting.signer,
            cargo=self._cargo,
            next_chunk=min(hello.chunks_held, len(self._cargo.chunks)),
            moved_s=self._clock(),
        )
        self._connections += 1
        self._session.say(MessageType.WELCOME, encode(welcome))
        if self._verdict is Verdict.STAY:
            self._say_verdict(self._session)

    def _reason_against(self, hello: Hello) -> str:
        identity = self._identity
        if hello.job != job_digest(identity.job_id):
            return "this is another job"
        if hello.global_rank != identity.global_rank:
            return f"found a joiner of global rank {hello.global_rank}, expected {identity.global_rank}"
        if hello.generation != identity.generation:
            return f"found a joiner of generation {hello.generation}, expected {identity.generation}"
        if hello.layout != (self._cargo.layout or self._layout or hello.layout):
            reason = "the joiner rank lays its state out in another way; do both run the same versions and settings?"
            if self._cargo.layout:
                self._failure = TransferRefused(reason)
            return reason
        if not 0 <= hello.chunks_held <= max(len(self._cargo.chunks), 0) and self._cargo.layout:
            return f"found {hello.chunks_held} chunks held, expected at most {len(self._cargo.chunks)}"
        return ""

    def _hear(self, session: Session) -> None:
        said = session.receive(self._clock())
        if isinstance(said, Ack):
            checksums = [self._cargo.checksum_of(index) for index in range(len(self._cargo.chunks))]
            if said.digest != total_digest(self._cargo.layout, checksums, self._cargo.small):
                self._failure = TransferRefused(
                    "the joiner rank acknowledged other bytes than were sent; keep this one"
                )
                return
            self._is_acknowledged = True
            if self._verdict is not None and not session.said_verdict:
                self._say_verdict(session)
        elif isinstance(said, Failed):
            self._failure = TransferRefused(f"the joiner rank: {said.reason[:REASON_CHARACTERS_MAX]}")
        elif said is MessageType.GOT and session.said_verdict:
            self._is_confirmed = True

    def _say_verdict(self, session: Session) -> None:
        assert self._verdict is not None
        session.say_verdict(self._verdict.value)

    def _give_up_idle(self) -> None:
        now_s = self._clock()
        for greeting in list(self._greetings.values()):
            if now_s - greeting.opened_s > self._limits.handshake_s:
                self._drop_greeting(greeting)
        session = self._session
        if session is not None:
            stalls = session.has_to_send and now_s - session.moved_s > self._limits.stall_s
            if stalls or now_s - (session.partial_since_s or now_s) > self._limits.handshake_s:
                self._drop_session()

    def _drop_greeting(self, greeting: Greeting) -> None:
        self._greetings.pop(greeting.connection, None)
        self._selector.unregister(greeting.connection)
        greeting.connection.close()

    def _drop_early(self) -> None:
        if self._early is not None:
            greeting, self._early = self._early[0], None
            self._drop_greeting(greeting)

    def _drop_session(self) -> None:
        if self._session is not None:
            self._bytes_before += self._session.bytes_sent
            self._selector.unregister(self._session.connection)
            self._session.connection.close()
            self._session = None


def job_digest(job_id: str) -> bytes:
    """What a joiner says of its job."""
    return hashlib.sha256(job_id.encode()).digest()
