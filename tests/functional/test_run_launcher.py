"""`trainmover run` with real processes: what it prints, how it ends, and that nothing is left whatever is killed."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

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
        script: str,
        *flags: str,
        command: tuple[str, ...] = ("megatron.resilience.cli.main", "run"),
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.directory = directory
        self.log_dir = directory / f"logs-{self.mark}"
        path = directory / f"script_{self.mark}.py"
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

    def start(self, script: str, *flags: str, arguments: tuple[str, ...] = (), **environment: str) -> RunningJob:
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


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    starter = Jobs(tmp_path)
    yield starter
    starter.end()


def shape(machines: int, ranks: int) -> tuple[str, ...]:
    return ("--machines", str(machines), "--ranks-per-machine", str(ranks))


@pytest.mark.parametrize("start", START_MODES)
def test_merged_log_has_whole_prefixed_lines_of_all_ranks(jobs: Jobs, start: str) -> None:
    script = """
    import os, sys
    for number in range(300):
        print("line", number, "x" * (number % 80))
    sys.stderr.write("to stderr\\n")
    os.write(1, b"bad \\xff byte, no end")
    """
    job = jobs.start(script, *shape(2, 2), "--start", start)
    assert job.finish() == 0
    for rank in range(4):
        lines = [line.removeprefix(f"[rank {rank}] ") for line in job.lines if line.startswith(f"[rank {rank}] ")]
        expected = [f"line {number} {'x' * (number % 80)}" for number in range(300)]
        assert lines == [*expected, "to stderr", "bad \ufffd byte, no end"]
        logged = (job.log_dir / f"rank-{rank:04d}.log").read_bytes()
        assert logged == ("\n".join(expected) + "\nto stderr\n").encode() + b"bad \xff byte, no end"
    assert str(job.log_dir) in job.lines[-1]


@pytest.mark.parametrize("start", START_MODES)
def test_ranks_see_torchrun_environment_arguments_and_path(jobs: Jobs, start: str) -> None:
    script = """
    import os, sys
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS"
    names = [*names.split(), "GLOO_SOCKET_IFNAME"]
    print("env", *(os.environ[name] for name in names))
    print("port", os.environ["MASTER_PORT"], os.environ["PYTHONUNBUFFERED"])
    print("path", sys.path[0], __name__, __file__, sys.argv, sys.stdin.read() == "")
    """
    arguments = ("--lr", "1e-4", "--", "two words")
    job = jobs.start(script, *shape(2, 2), "--start", start, arguments=arguments, OMP_NUM_THREADS="3")
    assert job.finish() == 0
    seen = sorted(match[1] for match in job.wait_for_lines(r"env (.*)", 4))
    assert seen == [f"{rank} {rank % 2} 4 2 {rank // 2} 127.0.0.1 3 lo" for rank in range(4)]
    assert len({match[1] for match in job.wait_for_lines(r"port (\d+) 1$", 4)}) == 1
    path = job.directory / f"script_{job.mark}.py"
    expected = f"path {job.directory} __main__ {path} {[str(path), *arguments]} True"
    assert [line.split("] ", 1)[1] for line in job.lines if "] path" in line] == [expected] * 4


def test_forked_ranks_share_one_import_of_preloaded_modules(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "heavy_module.py").write_text("import os\nIMPORTED_BY = os.getpid()\n")
    script = """
    PRELOAD = ("heavy_module",)
    import heavy_module, os
    print("imported by parent", heavy_module.IMPORTED_BY == os.getppid())
    """
    job = jobs.start(script, *shape(1, 2))
    assert job.finish() == 0
    assert len(job.wait_for_lines(r"imported by parent True", 2)) == 2
    exec_job = jobs.start(script, *shape(1, 2), "--start", "exec")
    assert exec_job.finish() == 0
    assert len(exec_job.wait_for_lines(r"imported by parent False", 2)) == 2


@pytest.mark.parametrize("start", START_MODES)
def test_spawned_children_of_a_rank_find_its_script(jobs: Jobs, start: str) -> None:
    script = """
    import multiprocessing, os, sys
    def double(value):
        return 2 * value, sys.argv[1], __name__
    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        with context.Manager() as manager, context.Pool(1) as pool:
            shared = manager.dict(rank=int(os.environ["RANK"]))
            print("doubled", *pool.apply(double, (shared["rank"],)))
    """
    job = jobs.start(script, *shape(1, 2), "--start", start, arguments=("word",))
    assert job.finish() == 0
    assert sorted(match[1] for match in job.wait_for_lines(r"doubled (.*)", 2)) == [
        "0 word __mp_main__",
        "2 word __mp_main__",
    ]
    job.wait_until_nothing_lives()


def test_atexit_and_threads_of_a_forked_rank_run_as_usual(jobs: Jobs) -> None:
    script = """
    import atexit, sys, threading
    atexit.register(print, "at exit", sys.modules["__main__"].NAME if hasattr(sys.modules["__main__"], "NAME") else "?")
    NAME = "script"
    atexit.register(lambda: print("main is", sys.modules["__main__"].NAME))
    gate = threading.Event()
    threading.Thread(target=lambda: (gate.wait(20), print("thread done"))).start()
    gate.set()
    sys.exit(0)
    """
    job = jobs.start(script)
    assert job.finish() == 0
    job.wait_for_lines(r"thread done", 1)
    job.wait_for_lines(r"main is script", 1)


@pytest.mark.parametrize("start", START_MODES)
def test_cause_is_named_last_though_its_peers_failed_before_it(jobs: Jobs, start: str) -> None:
    script = CONNECTED + textwrap.dedent("""
    if rank != 0:
        assert peers[0].recv(1) == b"!"
        raise ConnectionError("Connection closed by peer [127.0.0.1]:1")
    for peer in peers:
        peer.sendall(b"!")
    for peer in peers:
        assert peer.recv(1) == b""
    raise ValueError("the real cause")
    """)
    job = jobs.start(script, *shape(2, 2), "--start", start)
    assert job.finish() == 1
    assert job.lines[-2] == "trainmover: global rank 0 on machine 0 failed: ValueError: the real cause"
    assert job.lines[-1].endswith("rank-0000.log")
    assert "raise ValueError" in (job.log_dir / "rank-0000.log").read_text()


@pytest.mark.parametrize("start", START_MODES)
def test_killed_rank_is_named_and_the_job_ends_soon(jobs: Jobs, start: str) -> None:
    script = CONNECTED + textwrap.dedent("""
    if rank in (0, 3):
        for peer in peers:
            peer.recv(1)
        raise RuntimeError("Connection reset by peer")
    time.sleep(1000)
    """)
    job = jobs.start(script, *shape(2, 2), "--start", start)
    ready = job.wait_for_lines(r"\[rank (\d)\] ready (\d+)", 4)
    victim = next(int(match[2]) for match in ready if match[1] == "2")
    killed_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    assert job.finish() == 1
    assert time.monotonic() - killed_s < 5
    assert job.lines[-2] == "trainmover: global rank 2 on machine 1 was killed by signal 9 (SIGKILL)"
    job.wait_until_nothing_lives(1.0)


def test_rank_that_raises_but_cannot_end_is_told_and_killed(jobs: Jobs) -> None:
    script = """
    import os, threading
    threading.Thread(target=threading.Event().wait).start()
    if os.environ["RANK"] == "1":
        raise ValueError("stuck on its way out")
    """
    job = jobs.start(script, *shape(1, 2))
    assert job.finish() == 1
    assert job.lines[-2] == "trainmover: global rank 1 on machine 0 failed: ValueError: stuck on its way out"


@pytest.mark.parametrize("victim", ["rank", "spawner", "launcher", "rank ends"])
@pytest.mark.parametrize("start", START_MODES)
def test_nothing_is_left_of_helpers_whoever_is_killed(jobs: Jobs, start: str, victim: str) -> None:
    script = HELPERS_SCRIPT
    if victim == "rank ends":
        script = script.replace("threading.Event().wait()", "os._exit(0)")
    job = jobs.start(script, *shape(2, 2), "--start", start)
    ready = job.wait_for_lines(r"\[rank \d\] ready (\d+) (\d+)", 4)
    memory = [match[1] for match in job.wait_for_lines(r"memory (\S+)", 4)]
    if victim != "rank ends":
        pid = {"rank": int(ready[0][1]), "spawner": int(ready[0][2]), "launcher": job.process.pid}[victim]
        assert len(job.living()) >= 1 + 2 + 4 * 4
        os.kill(pid, signal.SIGKILL)
    assert job.finish() == {"launcher": -9, "rank ends": 0}.get(victim, 1)
    job.wait_until_nothing_lives()
    if victim == "spawner":
        assert job.lines[-1].endswith(
            "the spawner of machine " + str(int(ready[0][0][6]) // 2) + " was killed by signal 9 (SIGKILL)"
        )
    left = [name for name in os.listdir("/dev/shm") if name in memory or name.endswith(job.mark)]
    assert left == []


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_left_after_a_kill_at_any_moment(jobs: Jobs, seed: int) -> None:
    chance = random.Random(seed)
    script = """
    import os, signal, subprocess, sys, threading
    print("ready", os.getpid(), flush=True)
    for _ in range(3):
        subprocess.Popen(["sleep", "1000"], start_new_session=bool(_ % 2))
    threading.Event().wait()
    """
    job = jobs.start(script, *shape(2, 2), "--start", chance.choice(START_MODES))
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(timeout=chance.uniform(0.05, 0.6))
    victim = chance.choice([job.process.pid, *job.living()])
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        job.process.send_signal(signal.SIGINT)  # a helper's death ends nothing, and a kill may have come too late
        job.process.send_signal(signal.SIGTERM)
    job.finish()
    job.wait_until_nothing_lives()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("start", START_MODES)
def test_stop_signal_reaches_every_rank_and_waits_for_it(jobs: Jobs, start: str, number: signal.Signals) -> None:
    script = """
    import os, signal, sys, threading
    def save(number, frame):
        print("saved on", signal.Signals(number).name, flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGUSR1, save)
    print("ready", flush=True)
    while True:
        signal.pause()
    """
    job = jobs.start(script, *shape(2, 2), "--start", start)
    job.wait_for_lines("ready", 4)
    job.process.send_signal(number)
    assert job.finish() == (130 if number == signal.SIGINT else 0)
    name = "SIGUSR1" if number == signal.SIGUSR1 else "SIGTERM"
    assert len(job.wait_for_lines(rf"\[rank \d\] saved on {name}", 4)) == 4
    job.wait_until_nothing_lives(1.0)


STUBBORN_SCRIPT = """
import signal
signal.signal(signal.SIGTERM, lambda number, frame: print("not yet", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_second_signal_ends_ranks_at_once(jobs: Jobs) -> None:
    job = jobs.start(STUBBORN_SCRIPT, *shape(2, 1), "--grace-period", "1000")
    job.wait_for_lines("ready", 2)
    job.process.send_signal(signal.SIGTERM)
    job.wait_for_lines("not yet", 2)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 1
    assert "failed" not in job.lines[-1]
    job.wait_until_nothing_lives(1.0)


def test_ranks_are_killed_when_the_grace_period_is_over(jobs: Jobs) -> None:
    job = jobs.start(STUBBORN_SCRIPT, *shape(2, 1), "--grace-period", "0.3")
    job.wait_for_lines("ready", 2)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 1
    job.wait_until_nothing_lives(1.0)


def test_ranks_without_a_handler_end_without_being_called_failed(jobs: Jobs) -> None:
    job = jobs.start(READY_SCRIPT, *shape(1, 2))
    job.wait_for_lines("ready", 2)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 1
    assert "killed by" not in "\n".join(job.lines)


def test_usage_error_of_the_script_is_exit_code_2(jobs: Jobs) -> None:
    script = """
    import argparse
    argparse.ArgumentParser(prog="pretrain").parse_args(["--nonsense"])
    """
    job = jobs.start(script, *shape(1, 2))
    assert job.finish() == 2
    assert re.search(r"global rank \d on machine 0 exited with code 2: pretrain: error: .*--nonsense", job.lines[-2])


def test_exit_code_2_after_training_began_is_a_failure(jobs: Jobs) -> None:
    job = jobs.start('print(" iteration 1/ 5 | lm loss: 2.0 |", flush=True); raise SystemExit(2)')
    assert job.finish() == 1
    assert "1 of 5 iterations, loss 2 -> 2" in job.lines[-3]


def test_preflight_refusal_is_passed_on_before_any_rank_starts(jobs: Jobs) -> None:
    script = """
    import os, sys
    def preflight():
        print("found 3 heads, world size", os.environ["WORLD_SIZE"], file=sys.stderr)
        raise SystemExit(2)
    if "--preflight-only" in sys.argv:
        preflight()
    print("a rank has started")
    """
    job = jobs.start(script, *shape(2, 2))
    assert job.finish() == 2
    assert job.lines == ["found 3 heads, world size 4"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_preflight_is_ended_with_its_helpers_by_a_signal(jobs: Jobs, number: signal.Signals) -> None:
    script = """
    import subprocess, threading
    def preflight():
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("checking", flush=True)
        threading.Event().wait()
    preflight()
    """
    job = jobs.start(script)
    job.wait_for_lines("checking", 1)
    job.process.send_signal(number)
    assert job.finish() == (130 if number == signal.SIGINT else 1)
    job.wait_until_nothing_lives()


def test_default_log_directory_is_new_for_each_job_and_latest_points_to_it(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('said')")
    command = [sys.executable, "-m", "megatron.resilience.cli.main", "run", "--", "script.py"]
    for number in range(1, 3):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=LIMIT_S, check=True, text=True)
        directories = [path for path in (tmp_path / "build/logs").iterdir() if not path.is_symlink()]
        assert len(directories) == number
        latest = (tmp_path / "build/logs/latest").resolve()
        assert (latest / "rank-0000.log").read_text() == "said\n"
        assert done.stdout.rstrip().endswith(f"logs in build/logs/{latest.name}")


def test_accepted_preflight_runs_once_and_training_follows(jobs: Jobs) -> None:
    script = """
    import sys
    def preflight(): ...
    print("preflight" if "--preflight-only" in sys.argv else "training")
    """
    job = jobs.start(script, *shape(1, 2))
    assert job.finish() == 0
    assert job.lines[0] == "preflight"
    said = sorted(line for line in job.lines[1:] if not line.startswith("trainmover"))
    assert said == ["[rank 0] training", "[rank 1] training"]


def test_two_jobs_at_once_do_not_meet(jobs: Jobs) -> None:
    script = CONNECTED + 'print("connected to", address[1])\n'
    both = [jobs.start(script, *shape(2, 2)) for _ in range(2)]
    assert [job.finish() for job in both] == [0, 0]
    ports = [{match[1] for match in job.wait_for_lines(r"connected to (\d+)", 4)} for job in both]
    assert len(ports[0]) == len(ports[1]) == 1
    assert ports[0] != ports[1]


def test_helpers_of_an_ended_rank_end_while_other_ranks_go_on(jobs: Jobs) -> None:
    script = """
    import os, pathlib, select, subprocess, sys, time
    note = pathlib.Path(sys.argv[1])
    if os.environ["RANK"] == "1":
        helper = subprocess.Popen(["sleep", "1000"])
        note.with_suffix(".new").write_text(str(helper.pid))
        note.with_suffix(".new").rename(note)
        os._exit(0)
    deadline = time.monotonic() + 20
    while not note.exists() and time.monotonic() < deadline:
        pass
    try:
        ended = select.select([os.pidfd_open(int(note.read_text()))], [], [], 20)[0]
    except ProcessLookupError:
        ended = True
    print("helper ended" if ended else "helper lives")
    """
    job = jobs.start(script, *shape(1, 2), arguments=(str(jobs.directory / "note"),))
    assert job.finish() == 0
    job.wait_for_lines("helper ended", 1)


@pytest.mark.parametrize("how", ["ends", "SIGKILL"])
@pytest.mark.parametrize("start", START_MODES)
def test_spawner_without_launcher_leaves_nothing(jobs: Jobs, start: str, how: str) -> None:
    # Killed, it can't end helpers: there Slurm does. Its ranks die with it all the same.
    helper = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)\n" if how == "ends" else ""
    script = helper + READY_SCRIPT + "\nsys.exit(0)"
    job = jobs.start_spawner(script if how == "SIGKILL" else script.replace("threading.Event().wait()", ""), start)
    if how == "SIGKILL":
        job.wait_for_lines("ready", 2)
        job.process.kill()
    assert job.finish() == (0 if how == "ends" else -9)
    job.wait_until_nothing_lives()


def test_spawners_alone_make_a_job_as_slurm_starts_them(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CONNECTED + "if rank == 1: raise ValueError('on the second machine')\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    spawners = [
        subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "megatron.resilience.agent.spawner",
                    "--machine",
                    str(machine),
                    "--machines",
                    "2",
                ),
                *("--ranks-per-machine", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)),
                *("--", str(tmp_path / "script.py")),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for machine in range(2)
    ]
    said = [spawner.communicate(timeout=LIMIT_S) for spawner in spawners]
    assert [spawner.returncode for spawner in spawners] == [0, 1]
    assert said[0][0].startswith("[rank 0] ready ")
    assert said[1][1].splitlines() == ["global rank 1 on machine 1 failed: ValueError: on the second machine"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_spawner_that_still_imports_ends_with_its_launcher(jobs: Jobs, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "endless_module.py").write_text(
        "import threading\nprint('importing', flush=True)\nthreading.Event().wait()"
    )
    job = jobs.start('PRELOAD = ("endless_module",)', *shape(2, 1), "--grace-period", "1000")
    job.wait_for_lines(r"\[machine \d\] importing", 2)
    job.process.send_signal(number)
    assert job.finish() == (-9 if number == signal.SIGKILL else 1)
    job.wait_until_nothing_lives()


def test_failure_ends_a_machine_that_still_imports(jobs: Jobs, tmp_path: Path) -> None:
    module = """
    import sys, threading
    if sys.argv[sys.argv.index("--machine") + 1] == "1":
        threading.Event().wait()
    """
    (tmp_path / "uneven_module.py").write_text(textwrap.dedent(module))
    job = jobs.start('PRELOAD = ("uneven_module",)\nraise ValueError("early")', *shape(2, 1))
    assert job.finish() == 1
    assert job.lines[-2] == "trainmover: global rank 0 on machine 0 failed: ValueError: early"
    job.wait_until_nothing_lives()


def test_stopped_spawner_holds_nothing_up(jobs: Jobs) -> None:
    job = jobs.start(READY_SCRIPT, *shape(2, 1))
    ready = {match[1]: match for match in job.wait_for_lines(r"\[rank (\d)\] ready (\d+) (\d+)", 2)}
    os.kill(int(ready["1"][3]), signal.SIGSTOP)
    os.kill(int(ready["0"][2]), signal.SIGKILL)
    assert job.finish() == 1
    assert job.lines[-2] == "trainmover: global rank 0 on machine 0 was killed by signal 9 (SIGKILL)"
    job.wait_until_nothing_lives()


def test_failing_preload_is_told_in_the_last_line(jobs: Jobs) -> None:
    job = jobs.start('PRELOAD = ("no_such_module_here",)', *shape(2, 1))
    assert job.finish() == 1
    assert re.search(r"the spawner of machine \d failed: ModuleNotFoundError: .*no_such_module_here", job.lines[-1])


def test_shared_memory_of_others_is_not_touched(jobs: Jobs) -> None:
    mark = uuid.uuid4().hex
    script = f"""
    import os
    open(f"/dev/shm/torch_{{os.getpid()}}_{mark}", "wb").close()
    open(f"/dev/shm/torch_{{os.getppid() * 1000}}_{mark}", "wb").close()
    open("/dev/shm/psm_{mark}", "wb").close()
    """
    before = Path(f"/dev/shm/torch_1_{mark}")
    before.touch()
    job = jobs.start(script)
    try:
        assert job.finish() == 0
        left = [name.replace(mark, "") for name in os.listdir("/dev/shm") if name.endswith(mark)]
        assert sorted(re.sub(r"\d{4,}_", "N_", name) for name in left) == ["psm_", "torch_1_", "torch_N_"]
    finally:
        for name in os.listdir("/dev/shm"):
            if name.endswith(mark):
                Path("/dev/shm", name).unlink()


def test_training_goes_on_when_nobody_reads_any_more(jobs: Jobs) -> None:
    job = jobs.start("import os\nfor number in range(20000): print(number)\nprint('all done')\n", *shape(1, 2))
    job.wait_for_lines(r"rank", 1)
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.wait(timeout=LIMIT_S) == 0
    assert (job.log_dir / "rank-0001.log").read_text().endswith("all done\n")


def test_terminal_shows_progress_and_the_log_above_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        'print(" iteration        30/     100 | elapsed time per iteration (ms): 312.4 | lm loss: 7.0E+00 |")\n'
    )
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-m", "megatron.resilience.cli.main", "run", "--log-dir", str(tmp_path), "--", str(script)],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # how the end of a terminal is told
        while data := os.read(ours, 65536):
            said += data
    os.close(ours)
    assert job.wait(timeout=LIMIT_S) == 0
    assert b"progress: 30/100 iterations, 312 ms each, ETA 0:22, loss 7.0000" in said
    assert b"[rank 0]  iteration        30/     100" in said


def test_launcher_and_spawner_import_no_torch() -> None:
    program = (
        "import sys, megatron.resilience.cli.main, megatron.resilience.agent.spawner\n"
        "sys.exit(any(name.split('.')[0] in ('torch', 'numpy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=LIMIT_S, check=False).returncode == 0
