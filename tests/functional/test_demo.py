"""`make demo`, the first thing a newcomer runs: learns, resumes and replaces a machine bit for bit, and says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
INCIDENT = re.compile(
    r"^  Machine machine-1 was replaced by machine-4 at iteration (\d+): downtime -?\d+ ms, "
    r"(\d+) links replaced and (\d+) kept;$",
    flags=re.MULTILINE,
)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)


def test_the_demo_learns_resumes_and_replaces_a_machine_bit_for_bit() -> None:
    done = run("scripts/demo.py")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for words in ("It learned.", "final state equal in every bit", "tokens of Python", "no bit of it changed"):
        assert words in done.stdout
    found = INCIDENT.search(done.stdout)
    assert found, done.stdout[-3000:]
    boundary, replaced, kept = map(int, found.groups())
    assert 1 < boundary < 50
    assert 0 < replaced < kept, "most links are among machines that stay"
    command = re.search(r"trainmover (incidents --resilience-dir \S+)$", done.stdout, flags=re.MULTILINE)
    assert command, done.stdout[-3000:]
    told = run("-m", "megatron.resilience.cli.main", *command[1].split(), "--json")
    assert told.returncode == 0, told.stderr
    assert f'"boundary": {boundary}' in told.stdout
