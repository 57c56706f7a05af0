"""GPT pre-training: what is particular to GPT (model, data, loss); `megatron.training.pretrain()` does the rest.

Run it by `trainmover run -- pretrain_gpt.py ...`, by torchrun, or alone for one rank. The flags are Megatron-LM's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron.training.data import BatchSource
    from megatron.training.layout import Plan

PRELOAD = ("megatron.training.preload", "megatron.training.pretrain")
"""Modules that a spawner imports once before it forks the ranks."""


def model_provider(plan: Plan, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
    """The GPT model chunk of this rank and virtual stage."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron.training.transformer_config import uses_transformer_engine

    model = plan.settings.model
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, uses_transformer_engine(plan), normalization=model.normalization, vp_stage=vp_stage
        ),
        vocab_size=plan.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=model.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        vp_stage=vp_stage,
    )


def datasets_provider(plan: Plan, sizes: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """Training, validation and test sets of at least `sizes` samples."""
    from megatron.training.data import build_gpt_datasets

    return build_gpt_datasets(plan, sizes)


def forward_step(source: BatchSource, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """One forward pass: the stage's output, and the function that turns the last stage's output into the loss."""
    batch = source.next_batch()
    output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
    return output, partial(masked_loss, batch.loss_mask)


def masked_loss(
    loss_mask: torch.Tensor | None, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum of the losses, number of counted tokens, {"lm loss": [sum, tokens]}); both inputs [batch, sequence].

    With context parallelism both are this rank's part; the trainer adds the parts up.
    """
    import torch

    assert loss_mask is not None, "the last stage reads data"
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.float().view(-1) * mask)
    tokens = mask.sum()
    report = torch.stack([total.detach(), tokens.detach()])
    return total, tokens.to(torch.int), {"lm loss": report}


def preflight(argv: list[str]) -> int:
    """Checks everything that can be checked without starting. 0, or 2 after one line on stderr; imports no torch."""
    from megatron.training.preflight import preflight_main

    return preflight_main(argv)


def main(argv: list[str]) -> int:
    """Trains as `argv` says; the exit code is 0, or 2 when the settings cannot work."""
    if "--preflight-only" in argv:
        return preflight(argv)
    from megatron.training.pretrain import pretrain

    return pretrain(argv, model_provider=model_provider, datasets_provider=datasets_provider, forward_step=forward_step)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
