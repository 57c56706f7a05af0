"""What a launcher's variables mean, and what a process without any is."""

from __future__ import annotations

import pytest

from megatron.training.config import SettingsError
from megatron.training.environment import read_environment

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_a_launchers_variables_are_read() -> None:
    found = read_environment(source=TORCHRUN)
    assert (found.global_rank, found.local_rank, found.world_size) == (5, 1, 8)
    assert (found.master_address, found.master_port) == ("10.0.0.1", 29500)


def test_a_process_started_by_hand_is_the_whole_job() -> None:
    found = read_environment(source={})
    assert (found.global_rank, found.local_rank, found.world_size, found.master_port) == (0, 0, 1, 0)


def test_the_variable_wins_over_the_flag() -> None:
    assert read_environment(3, source={}).local_rank == 3
    assert read_environment(3, source={"LOCAL_RANK": "1"}).local_rank == 1


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"WORLD_SIZE": "eight"}, "WORLD_SIZE is 'eight', expected a number"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK 8 is not below WORLD_SIZE 8"),
    ],
)
def test_broken_variables_are_refused(variables: dict[str, str], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        read_environment(source=variables)
