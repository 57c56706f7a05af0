"""The variables of a rank, counted as torchrun counts them."""

from __future__ import annotations

import pytest

from megatron.resilience.agent.environment import (
    JobShape,
    control_settings,
    default_environment,
    joining_environment,
    rank_environment,
)
from trainmover_ext.settings import read_settings

SHAPE = JobShape(machines=3, ranks_per_machine=2, master_addr="10.0.0.1", master_port=29500)


def test_rank_variables() -> None:
    assert rank_environment(SHAPE, group_rank=2, local_rank=1) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TRAINMOVER_MACHINE": "slot-2",
    }


def test_an_agents_ranks_are_told_their_machine_which_is_not_their_slot() -> None:
    told = rank_environment(SHAPE, group_rank=2, local_rank=1, machine_id="machine-7")
    assert (told["TRAINMOVER_MACHINE"], told["GROUP_RANK"]) == ("machine-7", "2")


def test_only_joiners_are_told_to_build_alone() -> None:
    assert joining_environment(socket_path="@a", generation=1) == {"TRAINMOVER_AGENT": "@a"}
    assert joining_environment(socket_path="@a", generation=4) == {
        "TRAINMOVER_AGENT": "@a",
        "TRAINMOVER_JOIN_GENERATION": "4",
        "TRAINMOVER_MODE": "isolated",
    }


def test_control_settings_are_empty_where_nothing_is_said() -> None:
    assert control_settings({}).controller == ""
    told = control_settings({"TRAINMOVER_TOKEN": "a", "TRAINMOVER_MACHINE": "b", "OMP_NUM_THREADS": "1"})
    assert (told.token, told.machine_id, told.threads, told.job) == ("a", "b", "1", "")


def test_the_data_plane_takes_no_name_of_the_control_plane_for_one_of_its_own_misspelt() -> None:
    told = {"TRAINMOVER_CONTROLLER": "a", "TRAINMOVER_RESILIENCE_DIR": "b", "TRAINMOVER_TOKEN": "c"}
    told |= joining_environment(socket_path="@a", generation=2)
    settings = read_settings(told | {"TRAINMOVER_MACHINE": "machine-1", "TRAINMOVER_JOB": "d"})
    assert (settings.machine_id, settings.token, settings.job_id, settings.isolated) == ("machine-1", "c", "d", True)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_gloo_uses_loopback_when_the_master_is_there(address: str) -> None:
    assert default_environment({}, address)["GLOO_SOCKET_IFNAME"] == "lo"


def test_defaults_never_replace_what_the_user_set() -> None:
    assert default_environment({}, "10.0.0.1") == {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    chosen = {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONUNBUFFERED": "",
    }
    assert default_environment(chosen, "127.0.0.1") == {}
