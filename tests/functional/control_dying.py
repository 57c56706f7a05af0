"""A controller that kills itself with SIGKILL around an entry it writes: `control_dying.py KIND:N before|after FLAGS`.

It is the N-th of that kind, such as SwitchPhase:2, in this life. Its store is the real one in a wrapper; everything
else is `trainmover controller`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from megatron.resilience.controller.main import parse_arguments, run, sqlite_store
from megatron.resilience.controller.store import Store
from megatron.resilience.protocol.journal import decode_entry


class DyingStore:
    """A store whose process ends just before, or just after, one entry is durable."""

    def __init__(self, store: Store, step: str, *, before: bool) -> None:
        self._store, self._before = store, before
        self._kind, number = step.split(":")
        self._left = int(number)

    @property
    def term(self) -> int:
        return self._store.term

    def read(self) -> Sequence[bytes]:
        return self._store.read()

    def append(self, entry: bytes) -> None:
        is_one = type(decode_entry(entry)).__name__ == self._kind
        self._left -= is_one
        is_last = is_one and self._left == 0
        if is_last and self._before:
            os.kill(os.getpid(), signal.SIGKILL)
        self._store.append(entry)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self._store.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    config = parse_arguments(sys.argv[3:])
    store = DyingStore(sqlite_store(config), sys.argv[1], before=sys.argv[2] == "before")
    sys.exit(run(config, store))
