"""Ranks fit where what they will need beyond what they hold is free; what is not known refuses nobody."""

from __future__ import annotations

import pytest

from megatron.resilience.protocol.memory import Peak, Room, shortage

GIB = 1 << 30


def host(needs: int, holds: int, free: int) -> tuple[Peak, Room]:
    return Peak(host_bytes=needs), Room(host_held_bytes=holds, host_free_bytes=free)


def device(needs: int, holds: int, free: int) -> tuple[Peak, Room]:
    return Peak(device_bytes=needs), Room(device_held_bytes=holds, device_free_bytes=free)


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        [host(100, 40, 60)],
        [host(100, 40, 120), host(100, 40, 120)],
        [host(30, 40, 1)],  # it holds more than the other ever needed, and that gives the next rank nothing
        [host(0, 40, 1)],
        [host(100, 0, 0)],
        [device(100, 40, 60), device(100, 40, 60)],
        [device(100, 40, 0)],
    ],
)
def test_ranks_that_fit_or_are_not_known(ranks: list[tuple[Peak, Room]]) -> None:
    assert shortage(ranks) == ""


def test_ranks_of_a_machine_share_its_memory() -> None:
    told = shortage([host(3 * GIB, GIB, 3 * GIB), host(3 * GIB, GIB, 3 * GIB)])
    assert told == "memory: its ranks will need 6.00 GiB, 4.00 GiB more than now, and 3.00 GiB is free"
    assert shortage([host(100, 40, 200), host(100, 40, 119)]).endswith("120 bytes more than now, and 119 bytes is free")
    assert "60 bytes more than now, and 59" in shortage([host(100, 40, 59), host(10, 40, 59)])


def test_each_rank_has_its_device_for_itself() -> None:
    told = shortage([device(100, 40, 60), device(100, 40, 59)])
    assert told == "memory of a device: its rank will need 100 bytes, 60 bytes more than now, and 59 bytes is free"
