"""A controller and agents of a small job, as real processes on loopback, for the tests of the control plane."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from megatron.resilience.controller.client import ControllerClient
from megatron.resilience.controller.directory import ResilienceDirectory
from megatron.resilience.controller.store import SqliteStore
from megatron.resilience.controller.wire import TlsFiles
from megatron.resilience.protocol.incidents import Incident
from megatron.resilience.protocol.journal import AnyEntry, Ledger, decode_entry
from megatron.resilience.protocol.messages import (
    AskIncidents,
    AskStatus,
    IncidentsAnswer,
    Migrate,
    Refused,
    StatusAnswer,
    UserAnswer,
)
from tests.functional.control_hub import ControlHub

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("control_rank.py")
DYING = Path(__file__).with_name("control_dying.py")
LIMIT_S = 60.0
MARK = "CONTROL_TEST_MARK"


class Process:
    """One started process and what it prints."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], directory: Path) -> None:
        self.name = name
        self.log = directory / f"{name}.{uuid.uuid4().hex[:6]}.log"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, limit_s: float = LIMIT_S) -> int:
        return self.process.wait(limit_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)


class ControlJob:
    """`slots` machines of `per_machine` ranks, and elastic ones."""

    def __init__(self, directory: Path, *, slots: int = 3, per_machine: int = 1, elastic: int = 1) -> None:
        self.directory = directory
        self.resilience = ResilienceDirectory(path=directory / "resilience")
        self.slots, self.per_machine, self.elastic = slots, per_machine, elastic
        self.script: tuple[str, ...] = (str(SCRIPT),)
        """What ranks run, with its arguments."""
        self.master_port = 1
        self.token = uuid.uuid4().hex
        self.mark = uuid.uuid4().hex
        self.hub = ControlHub(slots * per_machine)
        self.controllers: list[Process] = []
        self.agents: dict[str, Process] = {}
        self.environment: dict[str, str] = {}
        self.tls: TlsFiles | None = None

    # -------------------------------------------------------------- starting

    def _environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TRAINMOVER_TOKEN": self.token,
            "TRAINMOVER_JOB": "control-test",
            "CONTROL_HUB": self.hub.address,
            MARK: self.mark,
            **self.environment,
            **more,
        }

    def start_controller(self, *flags: str, die_at: str = "", half: bool = False) -> Process:
        """`die_at`: it kills itself when that entry, KIND:N, is on disk; `half`: just before it is."""
        program = ["-m", "megatron.resilience.cli.main", "controller"]
        if die_at:
            program = [str(DYING), die_at, "before" if half else "after"]
        command = [
            *(sys.executable, *program, "--resilience-dir", str(self.resilience.path), "--job", "control-test"),
            *("--machines", str(self.slots), "--ranks-per-machine", str(self.per_machine)),
            *("--linger", "5", *flags),
        ]
        started = Process("controller", command, self._environment(), self.directory)
        self.controllers.append(started)
        return started

    def start_agent(
        self, machine_id: str, *flags: str, elastic: bool = False, under: tuple[str, ...] = (), **environment: str
    ) -> Process:
        """`under`: a program that becomes the agent."""
        command = [
            *under,
            *(sys.executable, "-m", "megatron.resilience.agent.main"),
            *("--machines", str(self.slots), "--ranks-per-machine", str(self.per_machine)),
            *("--master-addr", "127.0.0.1", "--master-port", str(self.master_port)),
            *(*(("--elastic",) if elastic else ()), *flags, "--", *self.script),
        ]
        more = {"TRAINMOVER_CONTROLLER": str(self.resilience.path), "TRAINMOVER_MACHINE": machine_id, **environment}
        started = Process(machine_id, command, self._environment(**more), self.directory)
        self.agents[machine_id] = started
        return started

    def start(self, *, die_at: str = "", half: bool = False) -> None:
        self.start_controller(die_at=die_at, half=half)
        for number in range(self.slots + self.elastic):
            self.start_agent(f"machine-{number}", elastic=number >= self.slots)

    # -------------------------------------------------------------- asking

    @property
    def client(self) -> ControllerClient:
        return ControllerClient(where=str(self.resilience.path), token=self.token, tls=self.tls)

    def ask(self, command: Migrate | AskStatus | AskIncidents, patience_s: float = 30.0) -> list[UserAnswer]:
        return list(self.client.ask(command, patience_s=patience_s, retry=lambda: None))

    def status(self) -> StatusAnswer:
        (answer,) = self.ask(AskStatus())
        assert isinstance(answer, StatusAnswer)
        return answer

    def incidents(self) -> tuple[Incident, ...]:
        (answer,) = self.ask(AskIncidents())
        assert isinstance(answer, IncidentsAnswer)
        return answer.incidents

    def wait_for(self, state: str, limit_s: float = LIMIT_S) -> None:
        self.until(lambda: self.status().state == state, f"state {state}", limit_s)

    def until(self, holds: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
        deadline_s = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline_s, f"not within {limit_s} s: {what}\n{self.texts()}"
            threading.Event().wait(0.05)

    def migrate(self, *leavers: str, to: tuple[str, ...] = (), command_id: str = "") -> Waiting:
        return Waiting(self, Migrate(command_id=command_id or uuid.uuid4().hex, leavers=leavers, to=to))

    def migrate_when_free(self, leaver: str, joiner: str) -> UserAnswer:
        """To a machine whose ranks, released a moment ago, may still be on their way out."""
        results: list[UserAnswer] = []

        def taken() -> bool:
            results.append(self.migrate(leaver, to=(joiner,)).result())
            return not (isinstance(results[-1], Refused) and "still run there" in results[-1].why)

        self.until(taken, f"{joiner} free")
        return results[-1]

    def entries(self) -> list[AnyEntry]:
        """What the journal has, once no controller holds it."""
        store = SqliteStore(
            self.resilience.journal,
            description=f"job control-test, {self.slots} slots of {self.per_machine} ranks",
        )
        store.open()
        try:
            return [decode_entry(entry) for entry in store.read()]
        finally:
            store.close()

    def ledger(self) -> Ledger:
        """What the entries add up to."""
        ledger = Ledger()
        for entry in self.entries():
            ledger.apply(entry)
        return ledger

    # -------------------------------------------------------------- ending

    def finish(self) -> None:
        """The job trains to its end: all agents end well, and nothing is left."""
        self.hub.finish()
        for name, agent in self.agents.items():
            assert agent.wait() == 0, f"{name}\n{self.texts()}"
        self.wait_until_nothing_lives(spare=[one.process.pid for one in self.controllers])
        self.hub.check()

    def living(self) -> list[int]:
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return found

    def wait_until_nothing_lives(self, limit_s: float = 10.0, spare: list[int] | None = None) -> None:
        deadline_s = time.monotonic() + limit_s
        while living := [pid for pid in self.living() if pid not in (spare or [])]:
            assert time.monotonic() < deadline_s, f"left behind: {living}\n{self.texts()}"
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(living[0])
                select.select([pidfd], [], [], max(0.0, deadline_s - time.monotonic()))
                os.close(pidfd)

    def texts(self) -> str:
        processes = [*self.controllers, *self.agents.values()]
        return "\n".join(f"--- {one.name} {one.process.poll()}\n{one.text}" for one in processes)

    def end(self) -> None:
        """Whatever the test left."""
        self.hub.close()
        for process in [*self.agents.values(), *self.controllers]:
            process.process.kill()
            process.process.wait()
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Waiting:
    """A migration that was asked for, in a thread; `result()` gives its answers."""

    def __init__(self, job: ControlJob, command: Migrate) -> None:
        self._answers: list[UserAnswer] = []
        self._error: Exception | None = None
        self._job = job
        self.command = command
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for answer in self._job.client.ask(self.command, patience_s=LIMIT_S, retry=lambda: None):
                self._answers.append(answer)
        except Exception as error:  # noqa: BLE001 - told where the result is asked for
            self._error = error

    @property
    def answers(self) -> list[UserAnswer]:
        return list(self._answers)

    def result(self, limit_s: float = LIMIT_S) -> UserAnswer:
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), f"no end within {limit_s} s: {self._answers}\n{self._job.texts()}"
        if self._error is not None:
            raise self._error
        return self._answers[-1]


def certificates(directory: Path) -> dict[str, Path]:
    """An authority, and a certificate for 127.0.0.1 that it signed."""
    key, authority, request, certificate = (directory / name for name in ("k.pem", "ca.pem", "r.pem", "c.pem"))
    extension = directory / "names"
    extension.write_text("subjectAltName=IP:127.0.0.1\n")
    new = ("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=test")
    signed = ("openssl", "x509", "-req", "-CA", str(authority), "-CAkey", str(directory / "cak.pem"), "-days", "2")
    for command in (
        (*new, "-x509", "-days", "2", "-keyout", str(directory / "cak.pem"), "-out", str(authority)),
        (*new, "-keyout", str(key), "-out", str(request)),
        (*signed, "-CAcreateserial", "-in", str(request), "-extfile", str(extension), "-out", str(certificate)),
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    return {"authority": authority, "certificate": certificate, "key": key}
