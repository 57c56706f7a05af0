"""`make demo`, the first thing a newcomer runs: learns, resumes and replaces a machine bit for bit, and says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]


def test_the_demo_learns_resumes_and_replaces_a_machine_bit_for_bit() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/demo.py"], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for words in ("It learned.", "final state equal in every bit", "tokens of Python", "no bit of it changed"):
        assert words in done.stdout
