"""Fixtures that run whole training jobs and read back what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass
class JobResult:
    """Exit codes and logs of a job, and the records of its metrics file."""

    exit_codes: list[int]
    folder: Path
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(self.exit_codes)

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("*.log"))
        )

    def steps(self) -> list[tuple[Any, ...]]:
        """(loss, iteration, gradient norm, rate, scale, skipped) of each step, exact."""
        names = ("iteration", "grad_norm", "learning_rate", "loss_scale", "skipped")
        return [(r["losses"].get("lm loss"), *(r[name] for name in names)) for r in self.records if r["kind"] == "step"]

    def losses(self) -> list[float]:
        return [step[0] for step in self.steps()]

    def state(self) -> list[str]:
        """Digest of each rank's final state."""
        (record,) = [r for r in self.records if r["kind"] == "state"]
        return list(record["sha256"])


class JobServer:
    """One process that forks jobs (see job_server.py)."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "job_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        assert self._read() == "ready"

    def run(self, argv: list[str], *, world_size: int, folder: Path) -> JobResult:
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / "metrics.jsonl"
        argv = [*argv, "--metrics-file", str(metrics), "--log-state-digest"]
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"argv": argv, "world_size": world_size, "folder": str(folder)}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._read())
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return JobResult(exit_codes=answer["exit_codes"], folder=folder, records=records)

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=30)


@pytest.fixture(scope="session")
def jobs() -> Iterator[JobServer]:
    server = JobServer()
    yield server
    server.close()
