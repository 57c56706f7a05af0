"""Trains a small model under a wrapper of torch's own and prints its losses: `wrapped_model.py ddp|fsdp2|none`.

Started by torchrun in test_torch_wrappers.py. `none`, in one process: the same model on the batches of all `RANKS`.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainmover_ext  # noqa: F401  (registers the backend)

STEPS, RANKS = 12, 4


def build(wrapper: str) -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 32))
    if wrapper == "ddp":
        # Small buckets, so that several reductions are under way at once.
        return DistributedDataParallel(model, bucket_cap_mb=0.05)
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def mean_over_ranks(loss: torch.Tensor, wrapper: str) -> float:
    mean = loss.detach().clone()
    if wrapper != "none":
        torch.distributed.all_reduce(mean)
        mean /= RANKS
    return float(mean)


def main(wrapper: str) -> None:
    ranks = list(range(RANKS))
    if wrapper != "none":
        torch.distributed.init_process_group("trainmover")
        ranks = [torch.distributed.get_rank()]
    model = build(wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    generators = [torch.Generator().manual_seed(100 + rank) for rank in ranks]
    for _ in range(STEPS):
        batch = torch.cat([torch.randn(16, 64, generator=generator) for generator in generators])
        loss = (model(batch) - batch[:, :32].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = mean_over_ranks(loss, wrapper)
        if ranks[0] == 0:
            print("loss", mean.hex(), flush=True)
    if wrapper != "none":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
