"""A controller that kills itself with SIGKILL around the n-th entry it writes: `control_dying.py N before|after FLAGS`.

Its store is the real one in a wrapper; everything else is `trainmover controller`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from megatron.resilience.controller.main import parse_arguments, run, sqlite_store
from megatron.resilience.controller.store import Store


class DyingStore:
    """A store whose process ends just before, or just after, its n-th entry of this life is durable."""

    def __init__(self, store: Store, appends: int, *, before: bool) -> None:
        self._store, self._left, self._before = store, appends, before

    @property
    def term(self) -> int:
        return self._store.term

    def read(self) -> Sequence[bytes]:
        return self._store.read()

    def append(self, entry: bytes) -> None:
        self._left -= 1
        if self._left == 0 and self._before:
            os.kill(os.getpid(), signal.SIGKILL)
        self._store.append(entry)
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self._store.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    config = parse_arguments(sys.argv[3:])
    store = DyingStore(sqlite_store(config), int(sys.argv[1]), before=sys.argv[2] == "before")
    sys.exit(run(config, store))
