"""The `jobs` fixture: launchers that end with their test, whatever it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional.launcher import Jobs


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    starter = Jobs(tmp_path)
    yield starter
    starter.end()
