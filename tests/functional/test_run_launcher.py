"""`trainmover run` with real processes: what ranks see, what it prints, how it ends, what it refuses."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.functional.launcher import (
    CONNECTED,
    LIMIT_S,
    START_MODES,
    Jobs,
    shape,
)

pytestmark = pytest.mark.distributed


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
        "import sys, importlib, megatron.resilience.cli.main as main, megatron.resilience.agent.spawner\n"
        "modules = [importlib.import_module(name) for name in main._COMMANDS.values()]\n"
        "assert all(callable(module.main) for module in modules)\n"
        "sys.exit(any(name.split('.')[0] in ('torch', 'numpy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=LIMIT_S, check=False).returncode == 0
