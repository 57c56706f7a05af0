"""The resilience directory: whose eyes its files are for, and how an address is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.resilience.controller.directory import (
    DirectoryError,
    ResilienceDirectory,
    draw_token,
    newest,
    resolve_address,
)


@pytest.fixture
def directory(tmp_path: Path) -> ResilienceDirectory:
    made = ResilienceDirectory(path=tmp_path / "logs" / "a" / "resilience")
    made.make()
    return made


def test_token_and_directory_are_for_their_owner_alone(directory: ResilienceDirectory) -> None:
    before = os.umask(0)
    try:
        directory.write_token("secret")
    finally:
        os.umask(before)
    assert directory.token_file.stat().st_mode & 0o777 == 0o600
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert directory.read_token() == "secret"
    assert os.listdir(directory.path) == ["token"]


def test_token_that_others_may_read_is_refused(directory: ResilienceDirectory) -> None:
    directory.write_token("secret")
    directory.token_file.chmod(0o644)
    with pytest.raises(DirectoryError, match=r"found mode 0644 .* expected 0600"):
        directory.read_token()


def test_tokens_differ_and_are_long() -> None:
    tokens = {draw_token() for _ in range(10)}
    assert len(tokens) == 10
    assert all(len(token) == 64 for token in tokens)


def test_address_is_a_host_and_port_a_file_or_a_directory(directory: ResilienceDirectory, tmp_path: Path) -> None:
    assert resolve_address("10.0.0.1:7000") == "10.0.0.1:7000"
    with pytest.raises(DirectoryError, match="expected a controller's address"):
        resolve_address(str(directory.path))
    directory.write_address("127.0.0.1:1")
    assert resolve_address(str(directory.path)) == "127.0.0.1:1"
    directory.write_address("127.0.0.1:2")
    assert resolve_address(str(directory.address_file)) == "127.0.0.1:2"
    (tmp_path / "elsewhere").write_text("127.0.0.1:3\n")
    assert resolve_address(str(tmp_path / "elsewhere")) == "127.0.0.1:3"


def test_newest_job_is_the_one_whose_controller_wrote_its_address_last(tmp_path: Path) -> None:
    assert newest(tmp_path / "logs") is None
    for number, name in enumerate(("b", "c", "a")):
        made = ResilienceDirectory(path=tmp_path / "logs" / name / "resilience")
        made.make()
        made.write_address("127.0.0.1:1")
        os.utime(made.address_file, ns=(number, number))
    found = newest(tmp_path / "logs")
    assert found is not None
    assert found.path == tmp_path / "logs" / "a" / "resilience"
