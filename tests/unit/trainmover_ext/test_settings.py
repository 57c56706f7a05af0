from __future__ import annotations

import dataclasses

import pytest

from trainmover_ext.settings import DataPlaneSettings, bind_address, read_settings, refuse_torch_settings


def test_nothing_set_is_the_documented_defaults() -> None:
    assert read_settings({}) == DataPlaneSettings(
        token=None,
        job_id="trainmover",
        machine_id="",
        bind_address="127.0.0.1",
        peer_timeout_ms=30_000,
        connect_timeout_ms=60_000,
        use_shared_memory=True,
        use_cross_memory=True,
        flight_recorder_prefix="",
        trace_prefix="",
        isolated=False,
        local_ranks=None,
    )


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("TRAINMOVER_TOKEN", "s3cret", "token", "s3cret"),
        ("TRAINMOVER_JOB", "night", "job_id", "night"),
        ("TRAINMOVER_MACHINE", "m7", "machine_id", "m7"),
        ("TRAINMOVER_BIND_ADDRESS", "10.0.0.7", "bind_address", "10.0.0.7"),
        ("TRAINMOVER_PEER_TIMEOUT_MS", "1500", "peer_timeout_ms", 1500),
        ("TRAINMOVER_CONNECT_TIMEOUT_MS", "1", "connect_timeout_ms", 1),
        ("TRAINMOVER_TRANSPORT", "tcp", "use_shared_memory", False),
        ("TRAINMOVER_CROSS_MEMORY", "off", "use_cross_memory", False),
        ("TRAINMOVER_FLIGHT_RECORDER", "/tmp/fr_", "flight_recorder_prefix", "/tmp/fr_"),
        ("TRAINMOVER_TRACE", "/tmp/tr_", "trace_prefix", "/tmp/tr_"),
        ("TRAINMOVER_MODE", "isolated", "isolated", True),
        ("LOCAL_WORLD_SIZE", "4", "local_ranks", 4),
    ],
)
def test_each_variable_sets_its_field_and_no_other(name: str, text: str, field: str, value: object) -> None:
    expected = dataclasses.asdict(read_settings({})) | {field: value}
    assert dataclasses.asdict(read_settings({name: text})) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TRAINMOVER_PEER_TIMEOUT_MS", "0"),
        ("TRAINMOVER_PEER_TIMEOUT_MS", "-5"),
        ("TRAINMOVER_PEER_TIMEOUT_MS", "1.5"),
        ("TRAINMOVER_PEER_TIMEOUT_MS", "99999999999"),
        ("TRAINMOVER_CONNECT_TIMEOUT_MS", "soon"),
        ("TRAINMOVER_TRANSPORT", "rdma"),
        ("TRAINMOVER_CROSS_MEMORY", "on"),
        ("TRAINMOVER_MODE", "LIVE"),
        ("TRAINMOVER_TOKEN", ""),
        ("TRAINMOVER_JOB", " "),
        ("LOCAL_WORLD_SIZE", "0"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        read_settings({name: text})


def test_a_misspelt_name_is_refused_with_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"TRAINMOVER_TRANSPROT is not known; did you mean TRAINMOVER_TRANSPORT\?"):
        read_settings({"TRAINMOVER_TRANSPROT": "tcp"})


def test_names_of_other_parts_are_left_alone() -> None:
    assert read_settings({"TRAINMOVER_AGENT_SOCKET": "x", "TRAINMOVER_SLOT": "3"}) == read_settings({})


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "127.3.2.1"])
def test_a_job_on_loopback_binds_to_loopback(master: str) -> None:
    assert bind_address({"MASTER_ADDR": master}) == "127.0.0.1"


def test_a_master_that_cannot_be_resolved_is_named() -> None:
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'no\.such\.host\.invalid'.*TRAINMOVER_BIND_ADDRESS"):
        bind_address({"MASTER_ADDR": "no.such.host.invalid"})


def test_torch_settings_under_which_no_rank_is_built_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_DEBUG is DETAIL"):
        refuse_torch_settings(debug_detail=False, source={"TORCH_DISTRIBUTED_DEBUG": "detail"})
    with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_DEBUG is DETAIL"):
        refuse_torch_settings(debug_detail=True, source={})
    with pytest.raises(ValueError, match="TORCH_DIST_INIT_BARRIER is set"):
        refuse_torch_settings(debug_detail=False, source={"TORCH_DIST_INIT_BARRIER": "1"})
    refuse_torch_settings(
        debug_detail=False, source={"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_DIST_INIT_BARRIER": "0"}
    )
