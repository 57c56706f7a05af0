"""A rank that is built alone has the parameter groups of the whole job, also of kinds that its stage does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron.resilience.patches import registry
from megatron.training import preload  # noqa: F401  (device and patches first)
from megatron.training.environment import read_environment
from megatron.training.initialize import join_job, leave_job
from megatron.training.preflight import plan_run
from tests.unit.conftest import TINY

EXPERTS = "--num-experts 4 --pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 4"
FIRST_STAGE, LAST_STAGE = 0, 3


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import trainmover_ext

    monkeypatch.setenv("TRAINMOVER_MODE", "isolated")
    yield
    leave_job()
    trainmover_ext.shutdown()


def groups(flags: str, *, rank: int) -> list[list[tuple[float, bool, bool]]]:
    """(weight decay, of experts, whether it holds any) of each group of each part of the optimizer of `rank` of 4."""
    from megatron.training.model_setup import build_trainee
    from pretrain_gpt import model_provider

    leave_job()
    words = TINY.replace("--num-layers 2 ", "").replace("--global-batch-size 2 ", "")
    plan, _ = plan_run([*words.split(), *EXPERTS.split(), *flags.split()], world_size=4, on_cuda=False)
    source = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "MASTER_PORT": "1"}
    join_job(plan, read_environment(source=source))
    optimizer: Any = build_trainee(plan, model_provider).optimizer
    return [
        [(g["wd_mult"], g["is_expert_parallel"], bool(g["params"])) for g in part.optimizer.param_groups]
        for part in optimizer.chained_optimizers
    ]


DENSE = [(1.0, False, True), (0.0, False, True)]
DENSE_KINDS = [(1.0, False), (0.0, False)]


def kinds(found: list[list[tuple[float, bool, bool]]]) -> list[list[tuple[float, bool]]]:
    return [[(decay, of_experts) for decay, of_experts, _ in part] for part in found]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("bias", ["", "--disable-bias-linear"])
@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_a_stage_without_experts_has_their_groups_empty(bias: str, precision: str) -> None:
    flags = f"--moe-layer-freq ([1]*2+[0]*2) --expert-model-parallel-size 2 {bias} {precision}"
    with_experts, without = groups(flags, rank=FIRST_STAGE), groups(flags, rank=LAST_STAGE)
    assert kinds(with_experts) == kinds(without)
    assert len(without) == 2
    assert all(holds for part in with_experts for _, _, holds in part)
    assert not any(holds for _, _, holds in without[1])
    registry.revert_patches(["optimizer-groups-alone"])
    try:
        assert kinds(groups(flags, rank=LAST_STAGE)) == [DENSE_KINDS]
    finally:
        registry.apply_patches(on_cuda=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "flags",
    ["--moe-layer-freq ([1]*2+[0]*2)", "--moe-layer-freq ([0]*4) --expert-model-parallel-size 2"],
    ids=["experts that are not spread", "no layer with experts"],
)
def test_no_group_is_made_up_that_no_rank_has(flags: str) -> None:
    assert groups(flags, rank=LAST_STAGE) == [DENSE]
