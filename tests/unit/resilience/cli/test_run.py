"""Usage errors of `trainmover run`: one line on standard error, exit code 2, nothing started."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megatron.resilience.cli.main import main
from megatron.resilience.controller.main import parse_arguments
from tests.unit.resilience.cli.finished import make


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text("raise SystemExit('must not run')\n")
    return str(path)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("trainmover: error: found ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--machnies", "2"], "unknown flag --machnies; did you mean --machines?"),
        (["--rank-per-machine=2"], "unknown flag --rank-per-machine; did you mean --ranks-per-machine?"),
        (["--zzz"], "expected one of"),
        (["--machines", "0"], "found --machines 0, expected at least 1"),
        (["--ranks-per-machine", "-1"], "found --ranks-per-machine -1, expected at least 1"),
        (["--machines", "two"], "invalid int value: 'two'"),
        (["--start", "spawn"], "invalid choice: 'spawn' (choose from 'fork', 'exec')"),
        (["--grace-period", "-1"], "--grace-period -1.0"),
        (["--grace-period", "nan"], "--grace-period nan"),
        (["--port", "70000"], "expected 1 to 65535"),
        (["stray.py"], "expected `--` before the script"),
        (["--elastic", "1"], "found --elastic without --resilience"),
        (["--resilience-dir", "dir"], "found --resilience-dir without --resilience"),
        (["--isolation", "netns"], "found --isolation without --resilience"),
        (["--tls-key", "k.pem"], "found --tls-key without --resilience"),
        (["--resilience", "--tls-key", "k.pem"], "expected all three or none"),
        (["--resilience", "--elastic", "-1"], "found --elastic -1, expected 0 or more"),
        (["--resilience", "--isolation", "vm"], "invalid choice: 'vm' (choose from 'none', 'netns')"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], script: str, flags: list[str], said: str) -> None:
    assert said in refusal(capsys, "run", *flags, "--", script)


def test_missing_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "found no script" in refusal(capsys, "run", "--machines", "2")
    assert "found no file" in refusal(capsys, "run", "--", str(tmp_path / "missing.py"))


def test_script_that_is_no_python(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = = 1\n")
    assert "line 1" in refusal(capsys, "run", "--", str(tmp_path / "bad.py"))


def test_busy_port(capsys: pytest.CaptureFixture[str], script: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"found port {port} in use" in refusal(capsys, "run", "--port", str(port), "--", script)


def test_log_directory_that_cannot_be_made(capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "not writable" in refusal(capsys, "run", "--log-dir", str(tmp_path / "file" / "logs"), "--", script)


def test_journal_of_an_earlier_job_is_not_continued(
    capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path
) -> None:
    (tmp_path / "resilience").mkdir()
    (tmp_path / "resilience" / "journal.sqlite").touch()
    chosen = ("--resilience-dir", str(tmp_path / "resilience"))
    said = refusal(capsys, "run", "--resilience", *chosen, "--", script)
    assert "found the journal of another job" in said
    assert "pass another --resilience-dir" in said
    said = refusal(capsys, "run", "--resilience", "--log-dir", str(tmp_path), "--", script)
    assert "found the journal of another job" in said
    assert "pass another --log-dir" in said


def test_namespaces_without_root_are_refused(
    capsys: pytest.CaptureFixture[str], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "expected root for --isolation netns" in refusal(
        capsys, "run", "--resilience", "--isolation", "netns", "--", script
    )


@pytest.mark.parametrize("command", ["status", "incidents"])
def test_commands_of_users_say_which_job_they_looked_for(
    capsys: pytest.CaptureFixture[str], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TRAINMOVER_RESILIENCE_DIR", "TRAINMOVER_CONTROLLER", "TRAINMOVER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert "found no job under build/logs" in refusal(capsys, command)
    assert "expected a job's token" in refusal(capsys, command, "--resilience-dir", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("TRAINMOVER_CONTROLLER", ()),
        ("TRAINMOVER_TOKEN", ("TRAINMOVER_CONTROLLER",)),
        ("TRAINMOVER_JOB", ("TRAINMOVER_CONTROLLER", "TRAINMOVER_TOKEN")),
        ("TRAINMOVER_MACHINE", ("TRAINMOVER_CONTROLLER", "TRAINMOVER_TOKEN", "TRAINMOVER_JOB")),
    ],
)
def test_agent_says_what_its_environment_lacks(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    name: str,
    arguments: tuple[str, ...],
) -> None:
    for given in ("TRAINMOVER_CONTROLLER", "TRAINMOVER_TOKEN", "TRAINMOVER_JOB", "TRAINMOVER_MACHINE"):
        monkeypatch.delenv(given, raising=False)
    for given in arguments:
        monkeypatch.setenv(given, "value")
    flags = ("--machines", "1", "--ranks-per-machine", "1", "--master-addr", "127.0.0.1", "--master-port", "1")
    assert f"found no {name} in the environment" in refusal(capsys, "agent", *flags, "--", script)


def test_a_part_of_the_tls_files_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("--resilience-dir", str(tmp_path), "--job", "a", "--machines", "1", "--ranks-per-machine", "1")
    assert "expected all three or none" in refusal(capsys, "controller", *flags, "--tls-key", "key.pem")


@pytest.mark.parametrize("command", ["status", "incidents", "migrate --from a", "controller --job a", "agent"])
def test_tls_files_that_cannot_be_read_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], command: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CONTROLLER", "TOKEN", "JOB", "MACHINE"):
        monkeypatch.setenv(f"TRAINMOVER_{variable}", "value")
    name, *flags = command.split()
    if name in ("controller", "agent"):
        flags += ["--machines", "1", "--ranks-per-machine", "1"]
    if name == "agent":
        flags += ["--master-addr", "127.0.0.1", "--master-port", "1"]
    else:
        make(tmp_path / "r")
        flags += ["--resilience-dir", str(tmp_path / "r")]
    for kind in ("authority", "certificate", "key"):
        flags += [f"--tls-{kind}", str(tmp_path / "no.pem")]
    if name == "agent":
        flags += ["--", script]
    assert "no.pem not readable (No such file or directory)" in refusal(capsys, name, *flags)


@pytest.mark.parametrize("listen", ["0.0.0.0:7070", "[::]:0"])
def test_controller_that_nobody_could_find_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, listen: str
) -> None:
    flags = ("--resilience-dir", str(tmp_path), "--job", "a", "--machines", "1", "--ranks-per-machine", "1")
    said = refusal(capsys, "controller", *flags, "--listen", listen)
    assert f"found --listen {listen}, which names no host" in said
    config = parse_arguments([*flags, "--listen", listen, "--advertise", "here"])
    assert config.advertise == "here"


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean run?" in refusal(capsys, "rum")


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "run" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
    assert "--ranks-per-machine" in capsys.readouterr().out
