"""One rank of a job that is measured: `python -m benchmarks.collectives.rank`, started by job.py or by mpirun.

It connects to the benchmark's socket and obeys one JSON line at a time; between two it sleeps in the kernel, so that a
job whose turn it is not takes no time from the others. It ends when the socket is closed.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import numpy as np

from benchmarks.collectives.library import Array, Library, MpiLibrary, expected, open_store, open_torch
from megatron.resilience.agent.process_tree import set_parent_death_signal


class Rank:
    """What this process holds: its libraries and two vectors of the largest size."""

    def __init__(self, libraries: dict[str, Library], bytes_max: int) -> None:
        self._libraries = libraries
        # Written, not just reserved: a page that was only read costs its first writer a fault.
        self._source: Array = np.full(bytes_max // 4, 0, np.float32)
        self._target: Array = np.full(bytes_max // 4, 0, np.float32)

    def obey(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one message. Raises ValueError for a wrong result or an unknown message."""
        if message["do"] == "check":
            return self.check(message["library"], message["op"], message["bytes"])
        if message["do"] == "measure":
            return self.measure(message["library"], message["op"], message["bytes"], message["iterations"])
        if message["do"] == "rate":
            return self.rate(message["kind"], message["bytes"], message["seconds"])
        raise ValueError(f"found message {message['do']!r}, expected check, measure or rate")

    def check(self, name: str, op: str, size: int) -> dict[str, Any]:
        """Runs `op` once, and looks at every number of the result. Raises ValueError."""
        library, source, target = self._libraries[name], self._source[: size // 4], self._target[: size // 4]
        source.fill(library.rank + 1)
        target.fill(-1)
        call, result = library.prepare(op, source, target)
        library.barrier()
        call()
        if result is not None:
            wanted = expected(op, library.rank, library.ranks, len(source))
            wrong = np.flatnonzero(result[: len(wanted)] != wanted)
            if len(wrong):
                at = int(wrong[0])
                raise ValueError(
                    f"{name}: {op} of {size} bytes: found {result[at]} at element {at}, expected {wanted[at]} "
                    f"({len(wrong)} elements are wrong): a figure of a wrong sum is worth nothing"
                )
        source.fill(0)  # sums stay finite however often they are taken
        return {}

    def measure(self, name: str, op: str, size: int, iterations: int) -> dict[str, Any]:
        """Seconds of each of `iterations` calls, each begun after the library's own barrier; and of all together."""
        library = self._libraries[name]
        call, _ = library.prepare(op, self._source[: size // 4], self._target[: size // 4])
        seconds = []
        gc.disable()
        began = time.perf_counter()
        for number in range(iterations + 1):  # the first finds cold caches and isn't counted
            library.barrier()
            start = time.perf_counter()
            call()
            if number:
                seconds.append(time.perf_counter() - start)
        all_s = time.perf_counter() - began
        gc.enable()
        return {"seconds": seconds, "each_s": all_s / (iterations + 1)}

    def rate(self, kind: str, size: int, seconds: float) -> dict[str, Any]:
        """Bytes a second of this core: `kind` "reduce" is y += x, "copy" is y = x; x is counted, y isn't."""
        x, y = self._source[: size // 4], self._target[: size // 4]
        done, began = 0, time.perf_counter()
        while done == 0 or time.perf_counter() - began < seconds:
            if kind == "reduce":
                np.add(y, x, out=y)
            else:
                np.copyto(y, x)
            done += 1
        return {"bytes_per_s": done * size / (time.perf_counter() - began)}


def join(flags: argparse.Namespace, stream: TextIO) -> dict[str, Library]:
    """Says hello, learns where the others meet, and opens the libraries."""
    if flags.rank is None:
        mpi = MpiLibrary()
        answer(stream, {"rank": mpi.rank, "port": 0})
        stream.readline()
        return {"openmpi": mpi}
    store = open_store(0, flags.ranks, 0) if flags.rank == 0 else None
    answer(stream, {"rank": flags.rank, "port": store.port if store else 0})
    port = json.loads(stream.readline())["port"]
    store = store or open_store(flags.rank, flags.ranks, port)
    return open_torch(flags.libraries.split(","), flags.rank, flags.ranks, store)


def answer(stream: TextIO, reply: Mapping[str, Any]) -> None:
    """One line to the benchmark."""
    stream.write(json.dumps(reply) + "\n")
    stream.flush()


def main(words: Sequence[str] | None = None) -> int:
    """Joins, obeys until the socket closes; 1 when a message could not be obeyed (the reply has said why)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--libraries", required=True)
    parser.add_argument("--bytes-max", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int, help="left out under mpirun")
    flags = parser.parse_args(words)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(flags.socket)
        stream = connection.makefile("rw", encoding="utf-8", newline="\n")
        try:
            rank = Rank(join(flags, stream), flags.bytes_max)
            answer(stream, {})
            for line in stream:
                answer(stream, rank.obey(json.loads(line)))
        except (BrokenPipeError, ConnectionResetError):
            return 1  # the benchmark has gone
        except Exception as error:  # noqa: BLE001 - the edge of the process: the benchmark prints it
            answer(stream, {"error": f"{type(error).__name__}: {error}"})
            return 1
    return 0


if __name__ == "__main__":
    set_parent_death_signal(signal.SIGKILL)
    sys.exit(main())
