"""The token that a controller goes by."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.resilience.controller.directory import ResilienceDirectory
from megatron.resilience.controller.main import _settle_token


@pytest.mark.parametrize("given", [None, ""])
def test_a_token_is_kept_over_restarts_where_the_environment_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv("TRAINMOVER_TOKEN", raising=False)
    if given is not None:
        monkeypatch.setenv("TRAINMOVER_TOKEN", given)
    directory = ResilienceDirectory(path=tmp_path)
    first = _settle_token(directory)
    assert len(first) > 20
    assert _settle_token(directory) == first
    monkeypatch.setenv("TRAINMOVER_TOKEN", "mine")
    assert _settle_token(directory) == "mine"
    assert directory.read_token() == "mine"
