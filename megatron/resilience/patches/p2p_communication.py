"""Repair of megatron.core.pipeline_parallel.p2p_communication: batched sends between two stages get crossed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.resilience.patches.registry import Patch

ACTIVATION_TAG = 1
GRADIENT_TAG = 2


def _tagged_by_direction(_original: Callable[..., Any]) -> Callable[..., Any]:
    def _batched_p2p_ops(
        *,
        tensor_send_prev: torch.Tensor | None,
        tensor_recv_prev: torch.Tensor | None,
        tensor_send_next: torch.Tensor | None,
        tensor_recv_next: torch.Tensor | None,
        group: torch.distributed.ProcessGroup,
        prev_pipeline_rank: int,
        next_pipeline_rank: int,
    ) -> list[Any]:
        """One batch of sends and receives; activations (towards next) and gradients (towards prev) bear own tags."""
        send, receive = torch.distributed.isend, torch.distributed.irecv
        wanted = (
            (send, tensor_send_prev, prev_pipeline_rank, GRADIENT_TAG),
            (receive, tensor_recv_prev, prev_pipeline_rank, ACTIVATION_TAG),
            (send, tensor_send_next, next_pipeline_rank, ACTIVATION_TAG),
            (receive, tensor_recv_next, next_pipeline_rank, GRADIENT_TAG),
        )
        operations = [
            torch.distributed.P2POp(operation, tensor, peer, group, tag)
            for operation, tensor, peer, tag in wanted
            if tensor is not None
        ]
        return torch.distributed.batch_isend_irecv(operations) if operations else []

    return _batched_p2p_ops


PATCHES = (
    Patch(
        name="pipeline-direction-tags",
        module="megatron.core.pipeline_parallel.p2p_communication",
        attribute="_batched_p2p_ops",
        why="with two stages the previous and the next stage are one rank: untagged messages match in order of "
        "posting, so activations arrive as gradients and training goes silently wrong",
        versions=">=0.16,<0.17",
        sources=("4b0901807501c561",),
        make=_tagged_by_direction,
        cpu_only=True,  # NCCL has no tags; there the combination is refused
    ),
)
