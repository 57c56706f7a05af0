"""How many links a group makes: few, whatever runs on it; and that a group of 1,024 is built by one process alone."""

from __future__ import annotations

import time
from math import floor, log2
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import trainmover_ext
from tests.distributed.collectives import operands, runner
from tests.distributed.collectives.jobs import job
from tests.distributed.collectives.ranks import Ranks, environments
from tests.distributed.collectives.schedules import MOVES, REDUCTIONS, Call

pytestmark = pytest.mark.distributed

LARGE = 1024
COUNTS = (3, 40_000)
"""One up the tree and one, as doubles, around the ring."""


def run_every_collective() -> int:
    """From every root, small and large, each result checked. Links of the world's communicator after that."""
    groups = runner.groups()
    size, rank = groups.layout.size, groups.rank
    number = 0
    for kind in (*REDUCTIONS, *MOVES):
        for count in COUNTS:
            for root in range(size) if kind in ("reduce", "broadcast", "gather", "scatter") else (0,):
                number += 1
                memory = operands.Operands(5, call_of(kind, number, count, root, size), rank, size)
                for work in operands.STARTS[kind](memory, groups.handles[0]):
                    work.wait()
                memory.check()
    return max(stats["links"] for stats in trainmover_ext.communicator_stats())


def call_of(kind: str, number: int, count: int, root: int, size: int) -> Call:
    rows = size if kind.startswith("all_to_all") else 1
    columns = size if kind in ("reduce_scatter", "all_gather", "all_to_all", "all_to_all_single") else 1
    each = count // columns if columns > 1 else count
    return Call(
        number=number,
        group=0,
        kind=kind,
        dtype=torch.float64,
        op="sum" if kind in REDUCTIONS else "",
        counts=tuple((each,) * columns for _ in range(rows)),
        root=root,
        senders=(),
        tag=0,
        in_place=False,
        direct=False,
    )


@pytest.mark.parametrize("size", [8, 12])
def test_collectives_link_a_rank_to_few_others(size: int, tmp_path: Path) -> None:
    with job("tcp", size, tmp_path) as ranks:
        links = ranks.run(run_every_collective, [()] * size, limit_s=120)
        print(f"{size} ranks: {links} links")
        assert 0 < max(links) <= 2 * floor(log2(size)) + 2


def pose_as(rank: int) -> float:
    """Seconds to make the groups of a job of 1,024 as `rank`, and to run each collective, alone."""
    started_at = time.monotonic()
    dist.init_process_group("trainmover", store=HashStore(), rank=rank, world_size=LARGE)
    groups = [dist.group.WORLD]
    for size in (2, 8, 64, 512):
        first = rank // size * size
        groups.append(dist.new_group(list(range(first, first + size))))
    for group in groups:
        size = dist.get_world_size(group)
        tensor = torch.arange(6.0)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.arange(6.0))
        whole = torch.zeros(6 * size)
        dist.all_gather_into_tensor(whole, tensor, group=group)
        assert torch.equal(whole, tensor.repeat(size))
        dist.reduce_scatter_tensor(tensor, whole, group=group)
        dist.all_to_all_single(torch.zeros_like(whole), whole, group=group)
        dist.broadcast(tensor, group_src=0, group=group)
        dist.barrier(group=group)
        received = torch.ones(3)
        dist.recv(received, group_src=(dist.get_rank(group) + 1) % size, group=group)
        assert not received.any()
    assert all(stats["links"] == 0 for stats in trainmover_ext.communicator_stats())
    dist.destroy_process_group()
    return time.monotonic() - started_at


def test_one_process_alone_builds_the_groups_of_any_of_1024_ranks(tmp_path: Path) -> None:
    with Ranks(environments("tcp", 1, TRAINMOVER_MODE="isolated"), tmp_path / "logs") as ranks:
        for rank in (0, 1, 511, 512, 1000, LARGE - 1):
            took = ranks[0].call(pose_as, rank)
            print(f"rank {rank}: {took:.3f} s")
            assert took < 10
