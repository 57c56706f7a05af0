"""`trainmover run` when something dies or is told to end: the cause is named, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from tests.functional.launcher import (
    CONNECTED,
    HELPERS_SCRIPT,
    READY_SCRIPT,
    START_MODES,
    Jobs,
    shape,
)

pytestmark = pytest.mark.distributed


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
    assert job.living() == []


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
