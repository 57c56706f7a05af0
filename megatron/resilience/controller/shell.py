"""Carries the controller's decisions out: what is decided is written down first, then told. One thread, no waiting.

`Controller` holds the core, the store and the event log, and an outbox for each agent and user that is connected; the
server (`server.py`) fills and empties these. A step that fails on its way out ends the process: its successor replays
the journal, and training does not notice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron.resilience.controller.event_log import EventLog
from megatron.resilience.controller.store import Store
from megatron.resilience.protocol.controller_core import replay
from megatron.resilience.protocol.controller_words import (
    AgentLost,
    AgentSaid,
    Answer,
    Close,
    ControllerAction,
    ControllerEvent,
    JobSpec,
    Journal,
    Limits,
    Record,
    Send,
    Tick,
    UserAsked,
    UserLost,
)
from megatron.resilience.protocol.journal import decode_entry, encode_entry
from megatron.resilience.protocol.messages import Message, ToController, UserCommand

OUTBOX_MESSAGES_MAX = 16_384
"""Waiting for one agent or user; more, and it is cut off: an agent comes again and is told all that matters."""


def wall_clock() -> float:
    """Milliseconds since 1970."""
    return time.time() * 1000


class Clock:
    """Milliseconds since 1970 at its making, or `at_least_ms` if that is later, and from then on as time passes.

    A wall clock that was set back after the newest entry of the journal so makes no limit longer.
    """

    def __init__(self, *, at_least_ms: float = 0.0, wall: Callable[[], float] = wall_clock) -> None:
        self._offset_ms = max(wall(), at_least_ms) - time.monotonic() * 1000

    def __call__(self) -> float:
        """Now."""
        return self._offset_ms + time.monotonic() * 1000


class Outbox:
    """What waits to be sent over one connection; None ends it."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[Message | None] = asyncio.Queue(OUTBOX_MESSAGES_MAX)
        self._is_closed = False
        self.is_cut = False
        """Whether it was closed because it took too long."""

    def put(self, message: Message) -> None:
        """Queues `message`; a full box is cut off."""
        if self._is_closed:
            return
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            self._is_closed = self.is_cut = True

    def close(self) -> None:
        """No more comes; what is in it is sent."""
        if not self._is_closed:
            self._is_closed = True
            if not self._waiting.full():
                self._waiting.put_nowait(None)

    async def get(self) -> Message | None:
        """The next message, or None at the end."""
        if self.is_cut or (self._is_closed and self._waiting.empty()):
            return None
        return await self._waiting.get()


@dataclass(frozen=True, slots=True, kw_only=True)
class Linger:
    """How long a controller stays after its job's end."""

    quiet_s: float = 2.0
    """For users, and agents whose connection was lost on the way: since the last agent has gone."""
    away_s: float = 180.0
    """For machines that are away and have not heard of it: since the end, or this controller's start."""


class Controller:
    """See the module. Made and used in one event loop."""

    def __init__(
        self,
        spec: JobSpec,
        store: Store,
        event_log: EventLog,
        *,
        on_failure: Callable[[], None],
        limits: Limits | None = None,
        linger: Linger | None = None,
        wall: Callable[[], float] = wall_clock,
    ) -> None:
        self._linger = linger or Linger()
        self._over_since_ms: float | None = None
        self._quiet_since_ms: float | None = None
        self._store = store
        self._event_log = event_log
        entries = [decode_entry(payload) for payload in store.read()]
        self.core = replay(spec, entries, term=store.term, limits=limits)
        self._clock = Clock(at_least_ms=self.core.desk.now_ms, wall=wall)
        self._agents: dict[int, Outbox] = {}
        self._users: dict[int, Outbox] = {}
        self._number = 0
        self._on_failure = on_failure
        self.failure: Exception | None = None
        """Why it cannot go on: what it would decide now might not be written down."""
        event_log.write(
            Record(
                kind="INSTANT",
                incident_id="controller",
                name="started",
                time_ms=self._clock(),
                text=f"term {store.term}, {len(entries)} entries replayed",
            )
        )

    @property
    def may_end(self) -> bool:
        """The job is over, and all who have to hear of it have heard, or had time to ask."""
        now_ms = self._clock()
        if self._over_since_ms is None:
            return False
        if now_ms - self._over_since_ms >= self._linger.away_s * 1000:
            return True
        is_quiet = self._quiet_since_ms is not None and now_ms - self._quiet_since_ms >= self._linger.quiet_s * 1000
        return is_quiet and not self.core.untold()

    # ------------------------------------------------------------------ from the server

    def agent_came(self) -> tuple[int, Outbox]:
        """A new connection: (its number, what to send over it)."""
        self._number += 1
        outbox = self._agents[self._number] = Outbox()
        return self._number, outbox

    def agent_said(self, connection: int, message: ToController) -> None:
        """A message has come."""
        self._step(AgentSaid(connection=connection, message=message, time_ms=self._clock()))

    def agent_gone(self, connection: int) -> None:
        """The connection is lost or closed."""
        self._agents.pop(connection, None)
        self._step(AgentLost(connection=connection, time_ms=self._clock()))

    def user_asked(self, command: UserCommand) -> tuple[int, Outbox]:
        """A command: (the user's number, where answers appear)."""
        self._number += 1
        client = self._number
        outbox = self._users[client] = Outbox()
        self._step(UserAsked(client=client, command=command, time_ms=self._clock()))
        return client, outbox

    def user_gone(self, client: int) -> None:
        """A user listens no more."""
        self._users.pop(client, None)
        self._step(UserLost(client=client, time_ms=self._clock()))

    def tick(self) -> None:
        """Time has passed."""
        now_ms = self._clock()
        self._step(Tick(time_ms=now_ms))
        if self.core.desk.ledger.ended:
            self._over_since_ms = now_ms if self._over_since_ms is None else self._over_since_ms
            if self._agents:
                self._quiet_since_ms = None
            elif self._quiet_since_ms is None:
                self._quiet_since_ms = now_ms

    # ------------------------------------------------------------------ what follows

    def _step(self, event: ControllerEvent) -> None:
        if self.failure is not None:
            return
        try:
            for action in self.core.step(event):
                self._carry_out(action)
        except Exception as error:
            self.failure = error
            self._on_failure()
            raise

    def _carry_out(self, action: ControllerAction) -> None:
        match action:
            case Journal(entry=entry):
                self._store.append(encode_entry(entry))
            case Send(connection=connection, message=message):
                if connection in self._agents:
                    self._agents[connection].put(message)
            case Answer(client=client, message=message):
                if client in self._users:
                    self._users[client].put(message)
            case Close(connection=connection):
                if connection in self._agents:
                    self._agents[connection].close()
            case Record():
                self._event_log.write(action)
