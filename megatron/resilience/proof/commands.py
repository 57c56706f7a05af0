"""The commands of a user, as a program gives them to a job that it drives. Used by proofs and benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.resilience.agent.driven_run import DrivenRun, RunError

_COMMAND = (sys.executable, "-m", "megatron.resilience.cli.main")
_ASK_S = 60.0


def migrate(run: DrivenRun, resilience: Path, slots: Iterable[int], deadline_s: float) -> str:
    """Replaces the machines that hold `slots`, and returns the command's last line once that is over.

    The output of the job is read meanwhile. Raises RunError.
    """
    holders = {machine["slot"]: machine["machine_id"] for machine in ask(resilience, "status")["machines"]}
    leavers = [holders[slot] for slot in slots]
    words = [word for leaver in leavers for word in ("--from", leaver)]
    asked = subprocess.Popen(
        [*_COMMAND, "migrate", *words, "--resilience-dir", str(resilience)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        run.wait_for(lambda: asked.poll() is not None, deadline_s, f"the end of the migration of {leavers}")
    finally:
        if asked.poll() is None:
            asked.terminate()
        output, _ = asked.communicate()
    last = next(reversed(output.strip().splitlines()), "no word was said").removeprefix("trainmover: ")
    if asked.returncode:
        raise RunError(f"the migration of {', '.join(leavers)} failed: {last}")
    return last


def ask(resilience: Path, what: str) -> Any:
    """What `trainmover WHAT --json` says. Raises RunError."""
    command = [*_COMMAND, what, "--json", "--resilience-dir", str(resilience)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    if done.returncode:
        raise RunError(f"trainmover {what} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)
