"""`jobs`: launchers that end with their test, whatever it leaves. `untouched`: what an untouched run records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.resilience.proof.compare import Record
from tests.functional import tiny_training
from tests.functional.launcher import Jobs
from tests.functional.tiny_training import Untouched


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    starter = Jobs(tmp_path)
    yield starter
    starter.end()


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Untouched:
    """What the tiny training records, by ranks a machine; run when first asked for."""
    known: dict[int, list[Record]] = {}

    def run(ranks: int) -> list[Record]:
        if ranks not in known:
            jobs = Jobs(tmp_path_factory.mktemp(f"untouched-{ranks}"))
            try:
                assert tiny_training.start(jobs, ranks).finish() == 0
                known[ranks] = tiny_training.records_in(jobs.directory)
            finally:
                jobs.end()
        return known[ranks]

    return run
