"""Rank processes that a test steers: forked from one server that has imported everything, bounded and reaped.

A test makes `Ranks`, gives each rank functions to run (`start`, `result`, or `run` on all), and may kill or stop it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[3]
LIMIT_S = 60.0
GRACE_S = 3.0
"""For the others, once one has failed."""
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ["pytest", "tests.distributed.collectives.runner"]


class RankFailed(AssertionError):  # noqa: N818
    """What a rank ran raised, or did not end; carries its traceback or the end of its log."""


class RankDied(RankFailed):
    """The process ended before it answered."""


def _serve(connection: Connection, environment: Mapping[str, str], log: Path) -> None:
    """A rank's whole life: runs what it is told, until nobody is there to tell."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: with the server, which ends with the tests
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)
    for name in [name for name in os.environ if name.startswith("TRAINMOVER_")]:
        del os.environ[name]
    os.environ.update(environment)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (True, function(*arguments))
        except Exception:  # noqa: BLE001  (told to the test)
            answer = (False, traceback.format_exc())
        sys.stderr.flush()
        connection.send(answer)


def _start_server() -> None:
    """Once: later calls find it running."""
    _CONTEXT.set_forkserver_preload(_PRELOAD)
    outer = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    os.environ.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    try:
        forkserver.ensure_running()
    finally:
        for name, value in outer.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Rank:
    """One process."""

    def __init__(self, name: str, environment: Mapping[str, str], log: Path) -> None:
        _start_server()
        self.name = name
        self.log = log
        self.connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, dict(environment), log), name=name, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, function: Callable[..., object], *arguments: object) -> None:
        """Has the rank run `function`; `result` collects what it returns."""
        self.connection.send((function, arguments))

    def result(self, limit_s: float = LIMIT_S) -> Any:
        """What the function returned. Raises RankFailed for an error and, after `limit_s`, for silence."""
        try:
            if not self.connection.poll(limit_s):
                raise RankFailed(f"{self.name} did not answer in time\n{self._stacks()}")
            fine, value = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise RankDied(f"{self.name} ended before it answered\n{self.text()[-3000:]}") from error
        if not fine:
            raise RankFailed(f"{self.name}:\n{value}")
        return value

    def call(self, function: Callable[..., object], *arguments: object, limit_s: float = LIMIT_S) -> Any:
        self.start(function, *arguments)
        return self.result(limit_s)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        self._process.kill()
        self._process.join(10)
        assert not self._process.is_alive()

    def exit_code(self, limit_s: float = 10) -> int | None:
        """Of a process that ends by itself within `limit_s`."""
        self._process.join(limit_s)
        return self._process.exitcode

    def text(self) -> str:
        """What the process has written."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        self.connection.close()
        if self._process.is_alive():
            self.kill()
        self._process.join(10)
        self._process.close()

    def _stacks(self) -> str:
        """Where the process hangs, from itself."""
        before = self.text()
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_S
        while "most recent call first" not in self.text()[len(before) :] and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.text()[-5000:] or "(it says nothing: stopped, or gone)"


class Ranks:
    """Several processes. A context manager: none outlives it."""

    def __init__(self, environments: Sequence[Mapping[str, str]], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._environments = [dict(environment) for environment in environments]
        self._made = 0
        self._ranks: list[Rank] = []
        try:
            for number in range(len(environments)):
                self._ranks.append(self._new(number))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, number: int) -> Rank:
        return self._ranks[number]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks)

    def run(
        self, function: Callable[..., object], arguments: Sequence[Sequence[object]], limit_s: float = LIMIT_S
    ) -> list[Any]:
        """`function(*arguments[i])` on the i-th of the ranks, all at once; the results. Raises for all that failed."""
        chosen = self._ranks[: len(arguments)]
        for rank, given in zip(chosen, arguments, strict=True):
            rank.start(function, *given)
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + limit_s
        while missing := [number for number in range(len(chosen)) if number not in results]:
            ready = wait([chosen[number].connection for number in missing], max(0.0, deadline - time.monotonic()))
            for number in missing:
                if ready and chosen[number].connection not in ready:
                    continue
                try:
                    results[number] = chosen[number].result(0)
                except RankFailed as failure:
                    results[number] = None
                    failures.append(str(failure))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise RankFailed("\n".join(failures))
        return [results[number] for number in range(len(chosen))]

    def replace(self, number: int) -> Rank:
        """Kills rank `number`; another process takes its place."""
        self._ranks[number].close()
        self._ranks[number] = self._new(number)
        return self._ranks[number]

    def spare(self, number: int, **more: str) -> Rank:
        """A process that could be rank `number`, and is none of these. To be closed by whoever asked. `more`:
        environment."""
        return self._new(number, **more)

    def put(self, number: int, rank: Rank) -> Rank:
        """`rank` is number `number` from now on. Returns the one before, to be closed by whoever asked."""
        before, self._ranks[number] = self._ranks[number], rank
        return before

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._ranks = []

    def _new(self, number: int, **more: str) -> Rank:
        self._made += 1
        log = self._folder / f"rank-{number}-{self._made}.log"
        return Rank(f"rank {number}", {**self._environments[number], **more}, log)


TRANSPORTS = ("shm", "tcp", "machines", "no-cross-memory")


def environments(transport: str, size: int, **more: str) -> list[dict[str, str]]:
    """Of each rank: how its messages travel, and `more`."""
    chosen: dict[str, Callable[[int], dict[str, str]]] = {
        "shm": lambda _: {},
        "tcp": lambda _: {"TRAINMOVER_TRANSPORT": "tcp"},
        "machines": lambda rank: {"TRAINMOVER_MACHINE": f"machine-{rank // 2}"},
        "no-cross-memory": lambda _: {"TRAINMOVER_CROSS_MEMORY": "off"},
    }
    return [{**chosen[transport](rank), **more} for rank in range(size)]
