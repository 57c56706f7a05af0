"""Leaves nothing behind, whatever happens to a benchmark: no process, no file but its result. Called by both."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.resilience.agent.process_tree import become_subreaper, descendants, end_processes, read_processes


@contextmanager
def nothing_left() -> Iterator[Path]:
    """A folder for sockets, logs and other libraries' files; at the end it and all descendants are gone.

    For a process of its own: every descendant is killed. SIGTERM becomes SystemExit(143) meanwhile.
    """
    become_subreaper()
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="tm-bench-"))
    own = os.getpid()
    try:
        yield folder
    finally:
        end_processes(lambda: descendants(read_processes(), own))
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
