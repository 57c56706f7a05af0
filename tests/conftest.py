"""Options of the whole test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the nightly simulation runs, and whether transcripts are written anew."""
    parser.addoption("--sim-minutes", type=float, default=5.0, help="minutes of the nightly protocol simulation")
    parser.addoption("--sim-first-seed", type=int, default=1_000_000, help="first seed of the nightly simulation")
    parser.addoption("--write-transcripts", action="store_true", help="write tests/transcripts/ anew")
