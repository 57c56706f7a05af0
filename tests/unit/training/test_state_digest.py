"""A digest sees every bit that a rank owns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron.training.state_digest import owned_tensors, state_digest

LoneRank = Callable[[str], AbstractContextManager[Any]]


def test_the_digest_changes_with_any_owned_tensor(lone_rank: LoneRank) -> None:
    with lone_rank("--use-distributed-optimizer") as rank:
        rank.step(1)
        before = state_digest(rank.trainee)
        assert state_digest(rank.trainee) == before
        for name, tensor in list(owned_tensors(rank.trainee)):
            bits = tensor.detach().reshape(-1)[:1].view(torch.uint8)
            bits[0] ^= 1
            assert state_digest(rank.trainee) != before, name
            bits[0] ^= 1
        assert state_digest(rank.trainee) == before


def test_parameters_and_both_moments_and_the_step_are_owned(lone_rank: LoneRank) -> None:
    with lone_rank("--bf16") as rank:
        rank.step(1)
        names = [name for name, _ in owned_tensors(rank.trainee)]
        assert len(names) == len(set(names))
        for kind in ("main", "exp_avg", "exp_avg_sq", "step"):
            assert any(name.startswith("optimizer") and name.endswith(f".{kind}") for name in names), kind
        assert any(name.startswith("chunk0.") and "word_embeddings" in name for name in names)
