"""Settings reach megatron-core's configuration, and nothing that needs CUDA is asked for without it."""

from __future__ import annotations

import pytest
import torch

from megatron.training import preload  # noqa: F401  (device and patches first)
from megatron.training.arguments import parse_settings
from megatron.training.layout import Plan, resolve
from megatron.training.transformer_config import checks_for_nan, ddp_config, optimizer_config, transformer_config

BASE = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 8 --seq-length 8 "
    "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data"
)


def plan(flags: str = "", world_size: int = 4) -> Plan:
    return resolve(parse_settings(f"{BASE} {flags}".split()), world_size=world_size, on_cuda=False)


def test_no_fused_kernel_is_asked_for_without_cuda() -> None:
    config = transformer_config(plan())
    fused = [name for name in vars(config) if name.endswith("_fusion") and getattr(config, name)]
    assert fused == []
    assert not config.persist_layer_norm


@pytest.mark.parametrize(
    ("flags", "dtype"), [("", torch.float32), ("--bf16", torch.bfloat16), ("--fp16", torch.float16)]
)
def test_precision_reaches_parameters_pipeline_and_optimizer(flags: str, dtype: torch.dtype) -> None:
    config = transformer_config(plan(flags))
    assert config.params_dtype == config.pipeline_dtype == optimizer_config(plan(flags)).params_dtype == dtype


def test_bf16_reduces_gradients_in_fp32() -> None:
    assert ddp_config(plan("--bf16")).grad_reduce_in_fp32
    assert not ddp_config(plan()).grad_reduce_in_fp32


@pytest.mark.parametrize(
    ("flags", "checked"),
    [
        ("", True),
        ("--bf16", True),
        ("--fp16", False),  # a dynamic scale overflows in good health
        ("--fp16 --loss-scale 8", True),
        ("--no-check-for-nan-in-loss-and-grad", False),
    ],
)
def test_not_a_number_is_an_error_only_where_it_cannot_be_an_overflow(flags: str, checked: bool) -> None:
    assert checks_for_nan(plan(flags)) is checked
    assert ddp_config(plan(flags)).check_for_nan_in_grad is checked


def test_sends_overlap_only_with_virtual_stages() -> None:
    pipeline = "--pipeline-model-parallel-size 2"
    plain, interleaved = (
        plan(pipeline),
        plan(f"{pipeline} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8"),
    )
    assert transformer_config(plain).batch_p2p_comm
    assert transformer_config(interleaved).overlap_p2p_comm
    assert not transformer_config(interleaved).batch_p2p_comm


def test_experts_and_their_pattern_reach_the_configuration() -> None:
    config = transformer_config(plan("--num-experts 4 --moe-layer-freq ([0]+[1]*3) --disable-bias-linear"))
    assert config.num_moe_experts == 4
    assert config.moe_layer_freq == [0, 1, 1, 1]
    assert config.moe_ffn_hidden_size == 64


def test_gated_units_are_silu_and_narrower() -> None:
    config = transformer_config(plan("--swiglu --hidden-size 96"))
    assert config.gated_linear_unit
    assert config.activation_func is torch.nn.functional.silu
    assert config.ffn_hidden_size == 256
