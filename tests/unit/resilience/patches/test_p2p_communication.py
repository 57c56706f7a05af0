"""Two pipeline stages that are each other's next and previous exchange activations and gradients uncrossed."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each of two ranks sends one tensor as gradient (to prev) and one as activation (to next); both go to the same peer.
EXCHANGE = """
import os, sys
from megatron.training import preload
import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.resilience.patches import registry
folder, patched = sys.argv[1], sys.argv[2] == "patched"
if not patched:
    registry.revert_patches(["pipeline-direction-tags"])
rank = int(os.fork() == 0)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
gradient, activation = torch.full((2,), -1.0 - rank), torch.full((2,), 1.0 + rank)
from_prev, from_next = torch.zeros(2), torch.zeros(2)
for request in p2p_communication._batched_p2p_ops(
    tensor_send_prev=gradient, tensor_recv_prev=from_prev, tensor_send_next=activation, tensor_recv_next=from_next,
    group=torch.distributed.group.WORLD, prev_pipeline_rank=1 - rank, next_pipeline_rank=1 - rank,
):
    request.wait()
right = from_prev[0].item() > 0 and from_next[0].item() < 0
torch.distributed.barrier()
if rank:
    os._exit(0 if right else 3)
_, status = os.wait()
print("right" if right and status == 0 else "crossed")
"""


@pytest.mark.parametrize(("patch", "outcome"), [("patched", "right"), ("unpatched", "crossed")])
def test_activations_arrive_as_activations(tmp_path_factory: pytest.TempPathFactory, patch: str, outcome: str) -> None:
    folder = tmp_path_factory.mktemp(patch)
    done = subprocess.run(
        [sys.executable, "-c", EXCHANGE, str(folder), patch], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == outcome, done.stderr
