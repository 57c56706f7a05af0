"""Builds the C++ tests with each sanitizer and runs every executable; gives each fuzzer a turn, nightly a long one."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SANITIZERS = ["address,undefined", "thread"]
TESTS = sorted(source.stem for source in HERE.glob("*_test.cc"))
# One thread, no memory shared between processes: nothing for the thread sanitizer.
PURE = {"frame_test", "handshake_test", "kernels_test", "schedule_test", "sha256_test", "topology_test"}
# Long under it, and what threads of one process do, the others show too; schedules are pure arithmetic.
NIGHTLY = {
    *((name, "thread") for name in ("runtime_test", "channel_hostile_test", "channel_test", "link_test")),
    ("runtime_farewell_test", "thread"),
    ("schedule_test", "address,undefined"),
}
RUNS = [
    pytest.param(name, sanitizer, marks=[pytest.mark.nightly] if (name, sanitizer) in NIGHTLY else [])
    for sanitizer in SANITIZERS
    for name in TESTS
    if sanitizer != "thread" or name not in PURE
]
FUZZERS = sorted(source.stem for source in HERE.glob("fuzz_*.cc"))

BUILD_SECONDS_MAX = 900
RUN_SECONDS_MAX = 300
FUZZ_SECONDS = 10
FUZZ_SECONDS_NIGHTLY = 150

# Not detect_stack_use_after_return: exceptions become ten times slower with it, and the fuzzers throw all the time.
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_init_order=1:check_initialization_order=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}

pytestmark = pytest.mark.timeout(BUILD_SECONDS_MAX + RUN_SECONDS_MAX + 60)


def tool(name: str) -> str:
    """Path of `name`, from PATH or beside this interpreter."""
    search = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    found = shutil.which(name, path=search)
    if found is None:
        pytest.fail(f"found no {name} on PATH or beside {sys.executable}; install it: pip install {name}")
    return found


def output_of(command: list[str], seconds_max: float, env: dict[str, str] | None = None) -> str:
    """What `command` prints; fails the test with it unless the command ends well and in time."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds_max,
            env=env,
            cwd=ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        text = (expired.stdout or b"").decode(errors="replace")
        pytest.fail(f"{' '.join(command)}: still running after {seconds_max:.0f} s\n{text[-8000:]}")
    text = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}: exit status {done.returncode}\n{text[-8000:]}")
    return text


@functools.cache
def configured(sanitizer: str) -> Path:
    """Build folder of one sanitizer, configured; once per run of pytest."""
    folder = ROOT / "build" / "cpp" / sanitizer
    folder.mkdir(parents=True, exist_ok=True)
    command = [tool("cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DSANITIZER={sanitizer}"]
    output_of([*command, "-S", str(HERE), "-B", str(folder)], BUILD_SECONDS_MAX)
    return folder


def built(sanitizer: str, name: str) -> Path:
    """The executable `name`, built with `sanitizer` if it is not up to date. One build at a time in a folder."""
    lock = ROOT / "build" / "cpp" / f"{sanitizer}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        folder = configured(sanitizer)
        output_of([tool("ninja"), "-C", str(folder), "-j2", name], BUILD_SECONDS_MAX)
    return folder / name


def run(sanitizer: str, name: str, *arguments: str, seconds_max: float = RUN_SECONDS_MAX) -> str:
    """Runs one executable under its sanitizer and returns what it prints."""
    executable = built(sanitizer, name)
    return output_of([str(executable), *arguments], seconds_max, env={**os.environ, **SANITIZER_OPTIONS})


@pytest.mark.parametrize(("name", "sanitizer"), RUNS)
def test_every_cpp_test_passes_under_the_sanitizer(name: str, sanitizer: str) -> None:
    assert " 0 failed" in run(sanitizer, name)


@pytest.mark.parametrize("name", FUZZERS)
def test_a_short_turn_of_the_fuzzer_finds_nothing(name: str) -> None:
    output = run("address,undefined", name, str(FUZZ_SECONDS))
    assert "nothing found" in output
    print(output)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FUZZERS)
def test_a_long_turn_of_the_fuzzer_finds_nothing(name: str) -> None:
    output = run("address,undefined", name, str(FUZZ_SECONDS_NIGHTLY))
    assert "nothing found" in output
    print(output)


def test_there_are_tests_and_fuzzers() -> None:
    assert TESTS
    assert FUZZERS
