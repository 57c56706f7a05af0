"""State on its way, in a thread of its own, so that the rank can listen meanwhile. Events come out of a queue.

`megatron.resilience.state` does the sending and receiving; here it is started, watched and ended.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from megatron.resilience.protocol.switch import (
    LinkBroke,
    RankEvent,
    TransferAcked,
    TransferFailed,
    TransferWhole,
    VerdictCame,
)
from megatron.resilience.state.errors import LeaverStays, StateError
from megatron.resilience.state.state_client import StateClient
from megatron.resilience.state.state_server import StateServer
from megatron.resilience.state.transfer import TransferIdentity, TransferLimits, Verdict

_JOIN_S = 10.0
_STAY_S = 2.0
_BOUNDARY_S = 24 * 3600.0

Events = queue.SimpleQueue[RankEvent]
Work = Callable[[Callable[[], bool]], None]


class _Background:
    """One piece of work in a thread; what it raises becomes an event."""

    def __init__(self, events: Events, work: Work, failed: Callable[[str], RankEvent]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(events, work, failed), name="state", daemon=True)
        self._thread.start()

    def _run(self, events: Events, work: Work, failed: Callable[[str], RankEvent]) -> None:
        try:
            work(self._stop.is_set)
        except Exception as error:  # noqa: BLE001 - the edge of the thread: whoever waits for it is told
            if not self._stop.is_set():
                events.put(failed(f"{type(error).__name__}: {error}"))

    def stop(self) -> None:
        """Ends it. Returns when it has ended, or after a bounded time."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)


class LeaverTransfer:
    """A leaver rank's side."""

    def __init__(self, identity: TransferIdentity, inventory: Any, events: Events, *, transfer_s: float) -> None:
        self._identity = identity
        self._inventory = inventory
        self._events = events
        limits = TransferLimits(total_s=transfer_s)
        self._server = StateServer(identity, limits=limits, layout=inventory.layout_digest())
        self._sending: _Background | None = None
        self.generation = identity.generation
        self.bytes_moved = 0

    def listen(self, bind_address: str) -> str:
        """Where the joiner rank comes to. Raises OSError."""
        return self._server.listen(bind_address)

    def tend(self) -> None:
        """In each vote until the boundary: keeps the way in free for the joiner rank. Quick."""
        if self._sending is None:
            self._server.tend()

    def send(self) -> None:
        """Starts to give the state; TransferAcked or TransferFailed follows."""

        def work(cancelled: Callable[[], bool]) -> None:
            report = self._server.send_state(self._inventory, cancelled=cancelled)
            self.bytes_moved = report.bytes_moved
            self._events.put(TransferAcked(generation=self._identity.generation))

        self._sending = _Background(self._events, work, self._failed)

    def _failed(self, why: str) -> RankEvent:
        return TransferFailed(generation=self._identity.generation, why=why)

    def tell(self, *, leave: bool) -> bool:
        """The verdict, to the joiner rank; False if it could not be told."""
        if self._sending is not None and not leave:
            self._sending.stop()
        try:
            if leave:
                return self._server.send_verdict(Verdict.LEAVE)
            return self._server.send_verdict(Verdict.STAY, within_s=_STAY_S)  # the joiner may be the reason
        except (StateError, OSError):
            return False

    def close(self) -> None:
        """Ends it all."""
        if self._sending is not None:
            self._sending.stop()
        self._server.close()


class JoinerTransfer:
    """A joiner rank's side."""

    def __init__(self, identity: TransferIdentity, address: str, inventory: Any, events: Events) -> None:
        self._identity = identity
        # Vetoes may put the boundary off for long; who gives the switch up tells the joiner to stop waiting.
        self._client = StateClient(identity, address, limits=TransferLimits(total_s=_BOUNDARY_S))
        self._inventory = inventory
        self._events = events
        self.generation = identity.generation
        self.bytes_moved = 0
        self._receiving = _Background(events, self._receive, self._broke)

    def _receive(self, cancelled: Callable[[], bool]) -> None:
        generation = self._identity.generation
        try:
            report = self._client.receive_state(self._inventory, cancelled=cancelled)
        except LeaverStays:
            self._events.put(VerdictCame(generation=generation, leave=False))
            return
        self.bytes_moved = report.bytes_moved
        self._events.put(TransferWhole(generation=generation))
        verdict = self._client.receive_verdict(cancelled=cancelled)
        self._events.put(VerdictCame(generation=generation, leave=verdict is Verdict.LEAVE))

    def _broke(self, why: str) -> RankEvent:
        return LinkBroke(generation=self._identity.generation, why=why)

    def close(self) -> None:
        """Ends it."""
        self._receiving.stop()
        self._client.close()
