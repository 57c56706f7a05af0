"""One step trains, reports what Megatron-LM reports, and stops at a loss that is not a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from megatron.training.step import NotANumberError

LoneRank = Callable[[str], AbstractContextManager[Any]]


def test_a_step_reports_its_loss_norm_samples_and_the_next_rate(lone_rank: LoneRank) -> None:
    with lone_rank("--lr-decay-style linear --lr-decay-iters 100") as rank:
        result = rank.step(1)
        assert result.losses["lm loss"] == pytest.approx(math.log(61), rel=0.05)
        assert result.grad_norm is not None
        assert result.grad_norm > 0
        assert result.samples == 2
        assert result.learning_rate == pytest.approx(3e-3 - (3e-3 - 3e-4) / 100)
        assert not result.skipped
        assert result.zeros_in_grad is None


def test_zeros_in_the_gradient_are_counted_when_asked(lone_rank: LoneRank) -> None:
    with lone_rank("--log-num-zeros-in-grad --untie-embeddings-and-output-weights") as rank:
        assert rank.step(1).zeros_in_grad > 0


def spoil(rank: Any) -> None:
    with torch.no_grad():
        next(iter(rank.trainee.model[0].parameters())).fill_(math.nan)


def test_a_loss_that_is_not_a_number_stops_the_run_by_name(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank:
        spoil(rank)
        # megatron-core's own check of the gradient may be the first to see it.
        with pytest.raises((NotANumberError, RuntimeError), match=r"nan|NaN"):
            rank.step(1)


def test_the_check_can_be_turned_off(lone_rank: LoneRank) -> None:
    with lone_rank("--no-check-for-nan-in-loss-and-grad") as rank:
        spoil(rank)
        assert math.isnan(rank.step(1).losses["lm loss"])


def test_a_masked_token_counts_in_neither_loss_nor_number() -> None:
    from pretrain_gpt import masked_loss

    total, tokens, report = masked_loss(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[2.0, 3.0, 100.0]]))
    assert (total.item(), tokens.item()) == (5.0, 2)
    assert report["lm loss"].tolist() == [5.0, 2.0]
