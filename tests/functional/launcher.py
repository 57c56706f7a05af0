"""A launcher under test, with real processes: started, read, and checked to have left nothing. For the tests here."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 60.0
MARK = "LAUNCHER_TEST_MARK"
START_MODES = ("fork", "exec")

READY_SCRIPT = """
import os, signal, sys, threading
print("ready", os.getpid(), os.getppid(), flush=True)
threading.Event().wait()
"""

# Rank 0 listens on the master port, the others hold a connection to it: the death of rank 0 is seen by all.
CONNECTED = """
import os, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
def connect():
    if rank == 0:
        with socket.create_server(address) as server:
            return [server.accept()[0] for _ in range(world - 1)]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            return [socket.create_connection(address)]
        except ConnectionRefusedError:
            pass
    raise SystemExit("no server")
peers = connect()
print("ready", os.getpid(), os.getppid(), flush=True)
"""

HELPERS_SCRIPT = """
import multiprocessing, os, subprocess, sys, threading
from multiprocessing import shared_memory
if __name__ == "__main__":
    manager = multiprocessing.get_context("spawn").Manager()
    shared = manager.dict(rank=os.environ["RANK"])
    memory = shared_memory.SharedMemory(create=True, size=4096)
    with open(f"/dev/shm/torch_{os.getpid()}_{os.environ['LAUNCHER_TEST_MARK']}", "wb") as file:
        file.write(b"left")
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("memory", memory.name, flush=True)
    print("helper", daemon.pid, flush=True)
    print("ready", os.getpid(), os.getppid(), flush=True)
    threading.Event().wait()
"""


class RunningJob:
    """A launcher under test, its output, and every process that bears its mark."""

    def __init__(
        self,
        directory: Path,
        script: str | Path,
        *flags: str,
        command: tuple[str, ...] = ("megatron.resilience.cli.main", "run"),
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.directory = directory
        self.log_dir = directory / f"logs-{self.mark}"
        path = script if isinstance(script, Path) else directory / f"script_{self.mark}.py"
        if isinstance(script, str):
            path.write_text(textwrap.dedent(script))
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command, "--log-dir", str(self.log_dir), *flags, "--", str(path), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: self.mark, **(environment or {})},
        )
        assert self.process.stdout is not None
        self._stream = self.process.stdout.fileno()
        self._received = b""

    @property
    def lines(self) -> list[str]:
        return self._received.decode().splitlines()

    def wait_for_lines(self, pattern: str, count: int) -> list[re.Match[str]]:
        """Reads until `count` lines match."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            # Whole lines only: the last one may still be on its way.
            whole = self._received.rpartition(b"\n")[0].decode().splitlines()
            found = [match for line in whole if (match := re.search(pattern, line))]
            if len(found) >= count:
                return found
            assert self._read(deadline), f"found {len(found)} of {count} lines like {pattern!r} in:\n" + "\n".join(
                whole
            )

    def _read(self, deadline: float) -> bool:
        if not select.select([self._stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        data = os.read(self._stream, 65536)
        self._received += data
        return bool(data)

    def finish(self) -> int:
        """Reads to the end of output; returns the exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline):
            pass
        return self.process.wait(timeout=max(0.1, deadline - time.monotonic()))

    def living(self) -> list[int]:
        """Pids of all processes that bear the mark."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return found

    def wait_until_nothing_lives(self, limit_s: float = 6.0) -> None:
        deadline = time.monotonic() + limit_s
        while living := self.living():
            assert time.monotonic() < deadline, f"left behind: {[describe_process(pid) for pid in living]}"
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(living[0])
                select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
                os.close(pidfd)

    def end(self) -> None:
        """Whatever the test left. A failing test shows what the job said."""
        print(*self.lines, sep="\n")
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def describe_process(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes().decode().split(chr(0))}"
    return str(pid)


class Jobs:
    """Starts jobs in the test's directory and ends them with the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[RunningJob] = []

    def start(self, script: str | Path, *flags: str, arguments: tuple[str, ...] = (), **environment: str) -> RunningJob:
        job = RunningJob(self.directory, script, *flags, arguments=arguments, environment=environment)
        self._started.append(job)
        return job

    def start_spawner(self, script: str, start: str) -> RunningJob:
        """One machine of two ranks, without a launcher."""
        flags = ("--machine", "0", *shape(1, 2), "--master-addr", "127.0.0.1", "--master-port", "1", "--start", start)
        job = RunningJob(self.directory, script, *flags, command=("megatron.resilience.agent.spawner",))
        self._started.append(job)
        return job

    def end(self) -> None:
        for job in self._started:
            job.end()


def shape(machines: int, ranks: int) -> tuple[str, ...]:
    return ("--machines", str(machines), "--ranks-per-machine", str(ranks))
