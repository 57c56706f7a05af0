"""A benchmark that is ended leaves no process and no folder."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.training_bench import ROOT
from megatron.resilience.agent.process_tree import read_process

LIMIT_S = 30

# A grandchild in a session of its own, as mpirun's ranks are: no signal to the group would reach it.
SCRIPT = """
import subprocess, sys, time
from benchmarks.processes import nothing_left
INNER = '''
import subprocess
sleep = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
print(sleep.pid, flush=True)
'''
with nothing_left() as folder:
    done = subprocess.run([sys.executable, "-c", INNER], stdout=subprocess.PIPE, text=True)
    print(folder, done.stdout.strip(), flush=True)
    if sys.argv[1] == "wait":
        time.sleep(1000)
    if sys.argv[1] == "raise":
        raise RuntimeError("something else")
"""


@pytest.mark.parametrize(("what", "code"), [("end", 0), ("raise", 1), ("wait", 128 + signal.SIGTERM)])
def test_nothing_is_left(what: str, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, what], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout
        folder, grandchild = process.stdout.readline().split()
        if what == "wait":
            process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == code
        assert read_process(int(grandchild)) is None
        assert not Path(folder).exists()
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)
