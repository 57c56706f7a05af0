"""`trainmover run --resilience` and the commands of users: a whole job on one computer whose machines are replaced."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.resilience.cli.tls_flags import tls_words
from megatron.resilience.controller.wire import TlsFiles
from tests.functional.control_hub import ControlHub
from tests.functional.control_job import ROOT, SCRIPT, certificates
from tests.functional.launcher import LIMIT_S, Jobs, RunningJob, shape

pytestmark = pytest.mark.distributed

PLAIN_SCRIPT = """
import os
print("env", os.environ["RANK"], os.environ["TRAINMOVER_MACHINE"], "TRAINMOVER_AGENT" in os.environ)
print(" iteration 1/ 1 | lm loss: 2.0 |", flush=True)
"""


@pytest.fixture
def hub() -> Iterator[ControlHub]:
    made = ControlHub(4)
    yield made
    made.close()


def start(jobs: Jobs, hub: ControlHub, *flags: str, address: str = "", leaver_code: str = "0") -> RunningJob:
    job = jobs.start(
        SCRIPT,
        *(*shape(2, 2), "--resilience", *flags),
        CONTROL_HUB=address or hub.address,
        CONTROL_LEAVER_CODE=leaver_code,
        PYTHONPATH=str(ROOT),
    )
    try:
        hub.wait_for_iterations(3)
    except AssertionError:
        job.process.terminate()
        job.finish()
        raise
    return job


def command(job: RunningJob, name: str, *flags: str) -> list[str]:
    directory = str(job.log_dir / "resilience")
    return [sys.executable, "-m", "megatron.resilience.cli.main", name, "--resilience-dir", directory, *flags]


def trainmover(job: RunningJob, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(job, name, *flags),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )


def wait_for_agents(job: RunningJob) -> None:
    """Until all three are back at a controller that was started again."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        status = json.loads(trainmover(job, "status", "--json").stdout or "{}")
        if [machine["attached"] for machine in status.get("machines", [])] == [True] * 3:
            return
        assert time.monotonic() < deadline_s, status


def controller_pids(job: RunningJob) -> list[int]:
    found = []
    for pid in job.living():
        with contextlib.suppress(OSError):
            if b"controller" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def test_output_and_exit_code_are_those_of_run_without_it(jobs: Jobs) -> None:
    plain = jobs.start(PLAIN_SCRIPT, *shape(2, 2))
    resilient = jobs.start(PLAIN_SCRIPT, *shape(2, 2), "--resilience", "--elastic", "1")
    assert [plain.finish(), resilient.finish()] == [0, 0]

    def said(job: RunningJob) -> list[str]:
        lines = [re.sub(r"logs-\w+|port \d+|:\d+|\d+\.\d s", "X", line) for line in job.lines]
        return sorted(line for line in lines if "trainmover: resilience in" not in line)

    expected = [line.replace("slot-", "machine-").replace(" False", " True") for line in said(plain)]
    assert said(resilient) == expected
    assert (resilient.log_dir / "rank-0003.log").is_file()
    resilient.wait_until_nothing_lives()


@pytest.mark.parametrize(("code", "expected"), [(3, 1), (2, 2)])
def test_failing_rank_ends_the_job_as_without_it(jobs: Jobs, code: int, expected: int) -> None:
    script = f"import os, time\nif os.environ['RANK'] == '3': raise SystemExit({code})\ntime.sleep(1000)"
    job = jobs.start(script, *shape(2, 2), "--resilience", "--elastic", "1")
    assert job.finish() == expected
    assert job.lines[-2] == f"trainmover: global rank 3 on machine 1 exited with code {code}"
    job.wait_until_nothing_lives()


def test_failing_preload_is_told_in_the_last_line(jobs: Jobs) -> None:
    job = jobs.start('PRELOAD = ("no_such_module_here",)', *shape(2, 1), "--resilience")
    assert job.finish() == 1
    assert re.search(r"the agent of machine \d failed: ModuleNotFoundError: .*no_such_module_here", job.lines[-1])
    job.wait_until_nothing_lives()


@pytest.mark.parametrize("code", [pytest.param("0", marks=pytest.mark.nightly), "5"])
def test_machine_is_replaced_by_command_and_the_job_ends_well(jobs: Jobs, hub: ControlHub, code: str) -> None:
    """`code`: with which the leaver's ranks end once they were released; it is no matter of the job's."""
    job = start(jobs, hub, "--elastic", "1", leaver_code=code)
    status = json.loads(trainmover(job, "status", "--json").stdout)
    assert [machine["slot"] for machine in status["machines"]] == [0, 1, None]
    assert "machine-2" in trainmover(job, "status").stdout
    moved = trainmover(job, "migrate", "--from", "machine-1")
    assert moved.returncode == 0, moved.stdout + moved.stderr
    lines = moved.stdout.splitlines()
    assert "preparing slot 1: machine-1 -> machine-2" in moved.stdout
    assert re.search(r"slot 1 from machine-1 to machine-2 at iteration \d+, downtime 12.5 ms \(start joiner", lines[-1])
    again = trainmover(job, "migrate", "--from", "machine-1")
    assert again.returncode == 1
    assert "refused: machine machine-1 holds no slot" in again.stderr
    (incident,) = json.loads(trainmover(job, "incidents", "--json").stdout)
    assert (incident["outcome"], incident["leavers"], incident["joiners"]) == ("done", ["machine-1"], ["machine-2"])
    assert "12.5 ms" in trainmover(job, "incidents").stdout
    hub.wait_for_iterations(3)
    hub.finish()
    assert job.finish() == 0
    assert json.loads(trainmover(job, "incidents", "--json").stdout) == [incident]  # from the journal
    hub.check()
    job.wait_for_lines("ends: the slot has moved in generation 2", 2)
    assert (job.log_dir / "rank-0003.generation-2.log").read_text().startswith("ready machine-2")
    assert not [line for line in job.lines if "failed" in line or "killed" in line]
    job.wait_until_nothing_lives()


@pytest.mark.nightly
def test_watched_status_follows_the_job_to_its_end(jobs: Jobs, hub: ControlHub) -> None:
    job = start(jobs, hub, "--elastic", "1")
    with subprocess.Popen(command(job, "status", "--watch"), stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        first = [watch.stdout.readline() for _ in range(3)]
        assert ": running, iteration" in first[0]
        assert trainmover(job, "migrate", "--from", "machine-1").returncode == 0
        hub.wait_for_iterations(150)  # it looks once a second
        hub.finish()
        assert job.finish() == 0
        later = watch.stdout.read()
    assert watch.returncode == 0
    assert re.search(r"machine-2 +│ 1 +│ 2", later)


def test_killed_controller_is_started_again_and_training_goes_on(jobs: Jobs, hub: ControlHub) -> None:
    job = start(jobs, hub, "--elastic", "1")
    for term in (2, 3):
        (pid,) = controller_pids(job)
        os.kill(pid, signal.SIGKILL)
        hub.wait_for_iterations(3)
        job.wait_for_lines("the controller was killed by signal 9; training goes on, it is started again", term - 1)
        wait_for_agents(job)
        moved = trainmover(job, "migrate", "--from", f"machine-{term - 1}")
        assert moved.returncode == 0, moved.stdout + moved.stderr
        assert json.loads(trainmover(job, "status", "--json").stdout)["term"] == term
    hub.finish()
    assert job.finish() == 0
    hub.check()
    job.wait_until_nothing_lives()


def test_controller_that_goes_away_otherwise_is_started_again_too(jobs: Jobs, hub: ControlHub) -> None:
    """Ended in order by a signal; killed when its address is gone, and its log cannot be opened."""
    job = start(jobs, hub, "--elastic", "1")
    directory = job.log_dir / "resilience"
    (pid,) = controller_pids(job)
    os.kill(pid, signal.SIGTERM)
    job.wait_for_lines("the controller ended with code 0: .*; training goes on, it is started again", 1)
    wait_for_agents(job)
    (pid,) = controller_pids(job)
    (directory / "controller.log").unlink()
    (directory / "controller.log").mkdir()
    (directory / "address").unlink()
    os.kill(pid, signal.SIGKILL)
    job.wait_for_lines("the controller was killed by signal 9; training goes on", 1)
    job.wait_for_lines(r"the controller cannot be started \(.*Is a directory.*\); training goes on", 1)
    (directory / "controller.log").rmdir()
    hub.wait_for_iterations(3)
    wait_for_agents(job)
    hub.finish()
    assert job.finish() == 0
    hub.check()
    job.wait_until_nothing_lives()


def test_second_job_with_the_same_log_directory_is_refused_at_once(jobs: Jobs, hub: ControlHub) -> None:
    job = start(jobs, hub)
    program = (sys.executable, "-m", "megatron.resilience.cli.main", "run", "--resilience")
    again = subprocess.run(
        [*program, *shape(2, 2), "--log-dir", str(job.log_dir), "--", str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert again.returncode == 2
    assert "found the journal of another job" in again.stderr
    assert "pass another --log-dir" in again.stderr
    hub.wait_for_iterations(3)
    hub.finish()
    assert job.finish() == 0


@pytest.mark.parametrize("victim", ["launcher", "agent", "rank", "elastic agent"])
def test_nothing_is_left_whatever_is_killed(jobs: Jobs, hub: ControlHub, victim: str) -> None:
    job = start(jobs, hub, "--elastic", "1")
    agents = {}
    for pid in job.living():
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        if b"megatron.resilience.agent.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            agents[next(line for line in environment if line.startswith("TRAINMOVER_MACHINE="))] = pid
    pid = {
        "launcher": job.process.pid,
        "agent": agents["TRAINMOVER_MACHINE=machine-1"],
        "elastic agent": agents["TRAINMOVER_MACHINE=machine-2"],
        "rank": hub.holder(2)[1],
    }[victim]
    os.kill(pid, signal.SIGKILL)
    if victim == "elastic agent":
        job.wait_for_lines("the agent of machine-2 was killed by signal 9; it held no slot, the job goes on", 1)
        hub.wait_for_iterations(3)
        hub.finish()
    code = job.finish()
    job.wait_until_nothing_lives(12.0)
    assert code == {"launcher": -9, "agent": 1, "elastic agent": 0, "rank": 1}[victim]
    if victim == "agent":
        assert job.lines[-1] == "trainmover: the agent of machine 1 was killed by signal 9 (SIGKILL)"
    if victim == "rank":
        assert job.lines[-2] == "trainmover: global rank 2 on machine 1 was killed by signal 9 (SIGKILL)"


def test_sigterm_ends_the_job_and_all_of_it(jobs: Jobs, hub: ControlHub) -> None:
    job = start(jobs, hub, "--elastic", "1")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 1
    assert any("SIGTERM: stopping" in line for line in job.lines)
    job.wait_until_nothing_lives()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_job_whose_controller_and_agents_show_certificates(jobs: Jobs, hub: ControlHub, tmp_path: Path) -> None:
    flags = tls_words(TlsFiles(**certificates(tmp_path)))
    job = start(jobs, hub, "--elastic", "1", *flags)
    assert "running" in trainmover(job, "status", *flags).stdout
    plain = trainmover(job, "status")
    assert plain.returncode == 1
    assert "no controller at" in plain.stderr
    moved = trainmover(job, "migrate", "--from", "machine-1", *flags)
    assert moved.returncode == 0, moved.stdout + moved.stderr
    hub.finish()
    assert job.finish() == 0
    job.wait_until_nothing_lives()


def test_token_is_on_no_command_line(jobs: Jobs, hub: ControlHub) -> None:
    job = start(jobs, hub)
    token = (job.log_dir / "resilience" / "token").read_text().strip()
    assert (job.log_dir / "resilience" / "token").stat().st_mode & 0o777 == 0o600
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in job.living()]
    assert len(lines) >= 8
    assert not [line for line in lines if token.encode() in line]
    hub.finish()
    assert job.finish() == 0
    assert not [line for line in job.lines if token in line]


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize("end", ["well", pytest.param("launcher killed", marks=pytest.mark.nightly)])
def test_machines_in_namespaces_of_their_own(jobs: Jobs, end: str) -> None:
    before = links()
    hub = ControlHub(4, host="0.0.0.0")
    try:
        job = start(jobs, hub, "--elastic", "1", "--isolation", "netns", address=f"bridge:{hub.port}")
        (pid,) = controller_pids(job)
        networks = {os.readlink(f"/proc/{hub.holder(rank)[1]}/ns/net") for rank in range(4)}
        assert len(networks) == 2
        assert os.readlink(f"/proc/{pid}/ns/net") not in networks
        moved = trainmover(job, "migrate", "--from", "machine-0")
        assert moved.returncode == 0, moved.stdout + moved.stderr
        assert len({os.readlink(f"/proc/{hub.holder(rank)[1]}/ns/net") for rank in range(4)}) == 2
        if end == "well":
            hub.finish()
            assert job.finish() == 0
        else:
            job.process.kill()
            assert job.finish() == -9
        job.wait_until_nothing_lives(12.0)
        deadline_s = time.monotonic() + LIMIT_S
        while links() != before:  # the kernel takes namespaces down a moment after their last process
            assert time.monotonic() < deadline_s, f"{links()}\nexpected\n{before}"
            threading.Event().wait(0.05)
    finally:
        hub.close()


def links() -> str:
    return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
