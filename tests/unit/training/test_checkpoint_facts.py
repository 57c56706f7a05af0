"""Claims about what a checkpoint tells of its run, and which runs may go on from it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.training.arguments import parse_settings
from megatron.training.checkpoint_facts import (
    check_resume,
    facts_of,
    model_shape,
    same_layout,
    schedule_of,
    with_checkpoint_shape,
)
from megatron.training.checkpoint_files import Checkpoint
from megatron.training.config import SettingsError
from megatron.training.layout import Plan, resolve

SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64"
REST = "--seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"
BASE = f"{SHAPE} {REST}"


def plan(more: str = "", *, base: str = BASE, world_size: int = 1, vocabulary: int = 1024) -> Plan:
    resolved = resolve(parse_settings(f"{base} {more}".split()), world_size=world_size, on_cuda=False)
    return dataclasses.replace(resolved, padded_vocab_size=vocabulary)


def checkpoint(of: Plan, **changes: Any) -> Checkpoint:
    """As it is read back: through JSON."""
    facts = facts_of(of, consumed_train_samples=20)
    return Checkpoint(
        folder=Path("/ckpt/iter_0000010"), iteration=10, facts={**json.loads(json.dumps(facts)), **changes}
    )


def complaint(more: str, saved: Checkpoint, *, world_size: int = 1) -> str:
    with pytest.raises(SettingsError) as caught:
        check_resume(plan(more, world_size=world_size), saved)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "/ckpt/iter_0000010" in text
    return text


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--group-query-attention --num-query-groups 2 --swiglu --position-embedding-type rope",
        "--num-experts 4 --moe-layer-freq ([0]+[1]*3) --disable-bias-linear",
        "--lr-warmup-fraction 0.3 --lr-decay-style cosine --bf16",
        "--lr-decay-style WSD --lr-wsd-decay-iters 3",
        "--start-weight-decay 0 --end-weight-decay 0.3 --weight-decay-incr-style linear",
        "--no-save-rng",
    ],
)
def test_a_run_goes_on_from_its_own_checkpoint(flags: str) -> None:
    check_resume(plan(flags), checkpoint(plan(flags)))
    assert same_layout(plan(flags), checkpoint(plan(flags)))


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--num-layers 8", "num-layers is 4 there, 8 here"),
        ("--hidden-size 128", "hidden-size is 64 there, 128 here"),
        ("--ffn-hidden-size 128", "ffn-hidden-size is 256 there"),
        ("--group-query-attention --num-query-groups 2", "num-query-groups is 4 there, 2 here"),
        ("--swiglu --ffn-hidden-size 256", "swiglu is False there, True here"),
        ("--normalization RMSNorm", "normalization is LayerNorm there"),
        ("--max-position-embeddings 128", "max-position-embeddings is 64 there"),
        ("--no-position-embedding", "position-embedding-type is learned_absolute there, none here"),
        ("--untie-embeddings-and-output-weights", "untie-embeddings-and-output-weights"),
        ("--num-experts 2 --disable-bias-linear", "add-bias-linear"),
        ("--num-experts 2", "num-experts is None there, 2 here"),
    ],
)
@pytest.mark.parametrize("mode", ["", "--finetune", "--no-load-optim"])
def test_another_model_is_refused_in_every_mode(flags: str, name: str, mode: str) -> None:
    text = complaint(f"{flags} {mode}", checkpoint(plan()))
    assert "is of another model" in text
    assert name in text


def test_the_longest_sequence_matters_for_learned_positions_alone() -> None:
    rope = "--position-embedding-type rope"
    check_resume(plan(f"{rope} --max-position-embeddings 128"), checkpoint(plan(rope)))


@pytest.mark.parametrize(
    ("saved_by", "flags", "expected"),
    [
        ("--no-save-optim", "", "holds no optimizer state; add --no-load-optim or --finetune"),
        ("", "--optimizer sgd", "optimizer kind=adam, expected sgd"),
        ("--use-distributed-optimizer", "", "optimizer distributed=True, expected False"),
        ("--bf16", "", "was trained in bf16, this run is fp32"),
    ],
)
def test_another_optimizer_is_refused_unless_it_is_not_loaded(saved_by: str, flags: str, expected: str) -> None:
    saved = checkpoint(plan(saved_by))
    assert expected in complaint(flags, saved)
    check_resume(plan(f"{flags} --no-load-optim"), saved)
    check_resume(plan(f"{flags} --finetune"), saved)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--lr 1e-4", "lr is 0.001 there, 0.0001 here"),
        ("--train-iters 20", "decay_samples is 20 there, 40 here"),
        ("--lr-warmup-iters 2", "warmup_samples is 0 there, 4 here"),
        ("--lr-decay-style cosine", "decay_style"),
        ("--weight-decay 0.1", "start_weight_decay"),
    ],
)
def test_another_schedule_is_refused_unless_one_is_chosen(flags: str, name: str) -> None:
    saved = checkpoint(plan())
    assert name in complaint(flags, saved)
    for choice in ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler", "--finetune"):
        check_resume(plan(f"{flags} {choice}"), saved)


def test_a_longer_run_goes_on_when_its_decay_stays() -> None:
    check_resume(plan("--train-iters 20 --lr-decay-iters 10"), checkpoint(plan()))


def test_the_schedule_counts_samples_in_either_unit() -> None:
    flags = "--lr-decay-iters 8 --lr-warmup-iters 2 --global-batch-size 4"
    by_iters = schedule_of(plan(flags))
    assert (by_iters["decay_samples"], by_iters["warmup_samples"]) == (32, 8)
    base = BASE.replace("--train-iters 10", "--train-samples 40")
    by_samples = schedule_of(plan("--lr-decay-samples 32 --lr-warmup-samples 8 --global-batch-size 4", base=base))
    assert by_samples == by_iters
    assert schedule_of(plan("--lr-warmup-fraction 0.25 --lr-decay-iters 8"))["warmup_samples"] == 4.0


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--tensor-model-parallel-size 2", 2),
        ("--pipeline-model-parallel-size 2", 2),
        ("", 2),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        ("--expert-tensor-parallel-size 2", 1),
    ],
)
def test_another_layout_is_told_apart_and_may_go_on(flags: str, world_size: int) -> None:
    saved = checkpoint(plan())
    other = plan(f"{flags} --global-batch-size 2 --micro-batch-size 1", world_size=world_size)
    assert not same_layout(other, saved)
    check_resume(other, saved)


@pytest.mark.parametrize("more", ["", "--finetune", "--no-load-optim"])
def test_the_vocabulary_must_pad_to_the_rows_that_were_saved(more: str) -> None:
    saved = checkpoint(plan("--tensor-model-parallel-size 2", world_size=2))
    check_resume(plan(more), saved)
    for rows in (896, 1152):
        with pytest.raises(SettingsError, match=f"1024 rows there, {rows} here"):
            check_resume(plan(more, vocabulary=rows), saved)


@pytest.mark.parametrize("flags", ["", "--num-experts 4", "--group-query-attention --num-query-groups 2 --swiglu"])
def test_the_shape_can_be_taken_from_the_checkpoint(flags: str) -> None:
    given = parse_settings(REST.split())
    resolved = resolve(with_checkpoint_shape(given, checkpoint(plan(flags))), world_size=1, on_cuda=False)
    found = dataclasses.replace(resolved, padded_vocab_size=1024)
    assert model_shape(found) == model_shape(plan(flags))
    check_resume(found, checkpoint(plan(flags)))


@pytest.mark.parametrize("part", ["model", "layout", "optimizer", "schedule", "precision", "rng_saved"])
def test_facts_of_another_version_are_refused(part: str) -> None:
    saved = checkpoint(plan())
    facts = {name: value for name, value in saved.facts.items() if name != part}
    broken = [Checkpoint(folder=saved.folder, iteration=10, facts=facts)]
    if isinstance(saved.facts[part], dict):
        broken.append(checkpoint(plan(), **{part: [1]}))
    for other in broken:
        assert f"does not say its {part}" in complaint("", other)
        with pytest.raises(SettingsError):
            with_checkpoint_shape(parse_settings([]), other)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("optimizer", {}),
        ("model", {}),
        ("schedule", {}),
    ],
)
def test_facts_of_wrong_kinds_are_refused(part: str, value: dict[str, Any]) -> None:
    saved = checkpoint(plan(), **{part: value})
    with pytest.raises(SettingsError):
        check_resume(plan(), saved)


@pytest.mark.parametrize(
    ("name", "value"), [("num_layers", "four"), ("num_layers", 4.5), ("swiglu", 1), ("normalization", ["x"])]
)
def test_a_shape_of_wrong_kinds_is_not_taken(name: str, value: Any) -> None:
    saved = checkpoint(plan())
    saved.facts["model"][name] = value
    with pytest.raises(SettingsError, match=f"its {name} is"):
        with_checkpoint_shape(parse_settings(REST.split()), saved)
