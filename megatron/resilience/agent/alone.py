"""How long an agent has been without its controller: a timer of the agent's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class AloneWatch:
    """Calls `late()` when there has been no controller for `limit_s`, once for each `limit_s` that follows."""

    def __init__(self, limit_s: float, late: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._late = late
        self._timer: asyncio.TimerHandle | None = None

    def lost(self) -> None:
        """There is none, from now on or since an earlier call."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._on_late)

    def met(self) -> None:
        """One has let the agent in."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        self._timer = None
        self.lost()
        self._late()
