"""Claims about the plan that settings give on a number of ranks; megatron-core's own arithmetic is the reference."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.training.arguments import parse_settings
from megatron.training.config import SettingsError
from megatron.training.layout import Plan, moe_layer_pattern, resolve

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64"
BASE = f"{MODEL} --micro-batch-size 2 --lr 1e-3 --mock-data"
BY_ITERS = f"{BASE} --train-iters 10"
BY_SAMPLES = f"{BASE} --train-samples 1000"


def plan(more: str = "", *, base: str = BY_ITERS, world_size: int = 1) -> Plan:
    return resolve(parse_settings([*base.split(), *more.split()]), world_size=world_size, on_cuda=False)


def complaint(more: str = "", *, base: str = BY_ITERS, world_size: int = 1) -> str:
    with pytest.raises(SettingsError) as caught:
        plan(more, base=base, world_size=world_size)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_nothing_given_names_all_that_is_required_at_once() -> None:
    text = complaint(base="")
    for name in (*MODEL.split()[::2], "--micro-batch-size", "--lr", "--train-iters (or --train-samples)"):
        assert name in text


def test_evaluation_alone_needs_no_learning_rate() -> None:
    assert plan("--skip-train", base=BY_ITERS.replace("--lr 1e-3", "")).settings.optimizer.lr is None


@pytest.mark.parametrize(
    "flag",
    [
        *("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "global-batch-size"),
        *("ffn-hidden-size", "kv-channels", "num-query-groups", "train-iters", "save-interval", "log-interval"),
        *("tensor-model-parallel-size", "expert-tensor-parallel-size", "num-virtual-stages-per-pipeline-rank"),
        *("make-vocab-size-divisible-by", "ddp-bucket-size", "num-experts", "moe-router-topk", "vocab-size"),
        *("decoder-first-pipeline-num-layers", "recompute-num-layers", "hysteresis", "tensorboard-log-interval"),
    ],
)
@pytest.mark.parametrize("value", ["0", "-4"])
def test_a_size_or_count_starts_at_one(flag: str, value: str) -> None:
    assert complaint(f"--group-query-attention --{flag}={value}") == f"--{flag} is {value}, expected at least 1"


@pytest.mark.parametrize(
    "flag", ["lr", "min-lr", "weight-decay", "clip-grad", "hidden-dropout", "eval-iters", "seed", "num-workers"]
)
def test_no_number_is_negative(flag: str) -> None:
    assert f"--{flag} is -1" in complaint(f"--{flag}=-1")


def test_zero_switches_off_what_can_be_switched_off() -> None:
    assert plan("--eval-iters 0 --eval-interval 0 --clip-grad 0 --num-workers 0 --seed 0 --exit-interval 0")


def test_a_seed_leaves_room_for_the_offsets_of_ranks() -> None:
    assert plan("--seed 2147483647")
    assert "--seed" in complaint("--seed 2147483648")


@given(tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2]), dp=st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_the_data_parallel_size_is_what_the_others_leave(tp: int, pp: int, cp: int, dp: int) -> None:
    sizes = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --context-parallel-size {cp}"
    found = plan(sizes, world_size=tp * pp * cp * dp)
    assert found.data_parallel_size == dp
    assert found.global_batch_size == 2 * dp
    assert found.train_samples == 10 * 2 * dp
    if tp * pp * cp > 1:
        assert "expected a multiple of" in complaint(sizes, world_size=tp * pp * cp * dp + 1)


@pytest.mark.parametrize("world_size", [0, -2])
def test_a_job_has_at_least_one_rank(world_size: int) -> None:
    assert f"found {world_size} ranks" in complaint(world_size=world_size)


def test_the_model_is_filled_in() -> None:
    model = plan().settings.model
    assert (model.kv_channels, model.ffn_hidden_size, model.num_query_groups) == (16, 256, 4)
    assert plan("--swiglu --hidden-size 4096").settings.model.ffn_hidden_size == 10880
    assert plan("--group-query-attention --num-query-groups 2").settings.model.num_query_groups == 2
    assert plan("--num-query-groups 2").settings.model.num_query_groups == 4
    assert plan("--num-attention-heads 3 --kv-channels 8").settings.model.kv_channels == 8
    assert "not a multiple of --num-attention-heads" in complaint("--num-attention-heads 3")
    assert plan("--apply-query-key-layer-scaling").settings.model.attention_softmax_in_fp32


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "learned_absolute"),
        ("--no-position-embedding", "none"),
        ("--position-embedding-type none", "none"),
        ("--position-embedding-type rope", "rope"),
        ("--position-embedding-type rope --no-position-embedding", "rope"),
        ("--use-rotary-position-embeddings", "rope"),
        ("--use-rotary-position-embeddings --no-position-embedding", "rope"),
    ],
)
def test_no_position_embedding_drops_learned_ones_only(flags: str, expected: str) -> None:
    assert plan(flags).settings.model.position_embedding_type == expected


def test_the_rest_is_filled_in() -> None:
    found = plan("--bf16 --recompute-activations --sequence-parallel")
    assert (found.settings.run.recompute_granularity, found.settings.run.recompute_modules) == (
        "selective",
        ("core_attn",),
    )
    assert found.precision == "bf16"
    assert found.settings.run.accumulate_allreduce_grads_in_fp32
    assert not found.settings.parallel.sequence_parallel
    assert plan("--tensor-model-parallel-size 2", world_size=2).settings.parallel.expert_tensor_parallel_size == 2
    assert found.settings.data.split == "969,30,1"
    assert (plan().precision, plan("--fp16").precision) == ("fp32", "fp16")
    assert found.settings.optimizer.end_weight_decay == 0.01


@pytest.mark.parametrize(
    ("flags", "kind", "vocab_size"),
    [
        ("--mock-data", "NullTokenizer", 1023),
        ("--mock-data --vocab-size 50", "NullTokenizer", 50),
        ("--mock-data --vocab-file f", "GPT2BPETokenizer", None),
        ("--data-path p", "GPT2BPETokenizer", None),
        ("--data-path p --tokenizer-type NullTokenizer --vocab-size 9", "NullTokenizer", 9),
    ],
)
def test_a_tokenizer_that_is_not_named_is_megatrons(flags: str, kind: str, vocab_size: int | None) -> None:
    data = plan(flags, base=BY_ITERS.replace("--mock-data", "")).settings.data
    assert (data.tokenizer_type, data.vocab_size) == (kind, vocab_size)


def test_the_global_batch_is_whole_micro_batches_on_every_rank() -> None:
    assert plan("--global-batch-size 8", world_size=2).global_batch_size == 8
    assert "--global-batch-size 6 is not a multiple of 4" in complaint("--global-batch-size 6", world_size=2)
    assert plan("--global-batch-size 6 --decrease-batch-size-if-needed", world_size=2).global_batch_size == 4
    text = complaint("--global-batch-size 2 --decrease-batch-size-if-needed", world_size=2)
    assert "--global-batch-size 2 is not a multiple of 4" in text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--rampup-batch-size 2 2", "three"),
        ("--rampup-batch-size 2 2 8 8", "three"),
        ("--rampup-batch-size 0 2 8", "at least 1"),
        ("--rampup-batch-size 2 2 0", "at least 1"),
        ("--rampup-batch-size 2 4 8", "whole number of steps"),
        ("--rampup-batch-size 8 2 8", "whole number of steps"),
        ("--rampup-batch-size 10 2 8", "whole number of steps"),
        ("--rampup-batch-size 1 1 8", "multiples of 2"),
    ],
)
def test_a_ramp_up_that_megatron_core_cannot_walk_is_refused(flags: str, expected: str) -> None:
    assert expected in complaint(f"--global-batch-size 8 {flags}")


@settings(deadline=None, max_examples=100)
@given(
    start=st.integers(1, 4),
    increment=st.integers(1, 4),
    steps=st.integers(1, 6),
    ramp=st.integers(1, 300),
    samples=st.integers(1, 900),
)
def test_the_iterations_of_a_ramp_up_are_counted_as_megatron_core_walks_it(
    start: int, increment: int, steps: int, ramp: int, samples: int
) -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    size = start + increment * steps
    calculator: Any = RampupBatchsizeNumMicroBatchesCalculator(size, 1, 1, False, 1, start, increment, ramp)
    consumed = iterations = 0
    while True:
        calculator.update(consumed, consistency_check=True)
        consumed += calculator.get_current_global_batch_size()
        if consumed > samples:
            break
        iterations += 1
    assume(iterations)
    flags = f"--micro-batch-size 1 --global-batch-size {size} --rampup-batch-size {start} {increment} {ramp}"
    found = plan(flags, base=f"{BASE} --train-samples {samples}")
    assert (found.train_iters, found.train_samples) == (iterations, samples)


def test_the_length_is_given_once_and_is_at_least_one_batch() -> None:
    assert (plan().train_iters, plan().train_samples) == (10, 20)
    assert plan("--global-batch-size 6", base=BY_SAMPLES).train_iters == 166
    assert "expected one; leave one out" in complaint("--train-samples 100")
    assert "less than the first batch" in complaint("--global-batch-size 8", base=f"{BASE} --train-samples 7")


@pytest.mark.parametrize("name", ["lr-decay", "lr-warmup", "lr-wsd-decay"])
def test_the_schedule_is_given_in_the_unit_of_the_length(name: str) -> None:
    assert f"--{name}-samples does not go with --train-iters" in complaint(f"--{name}-samples 5")
    assert f"--{name}-iters does not go with --train-samples" in complaint(f"--{name}-iters 5", base=BY_SAMPLES)


def test_the_decay_is_the_length_if_not_given() -> None:
    assert plan().settings.optimizer.lr_decay_iters == 10
    assert plan(base=BY_SAMPLES).settings.optimizer.lr_decay_samples == 1000
    assert plan("--lr-decay-iters 5").settings.optimizer.lr_decay_iters == 5


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lr-warmup-iters 10", "not shorter than the decay"),
        ("--lr-warmup-fraction 1.0", "not shorter than the decay"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", "expected one of them"),
        ("--min-lr 1e-2", "--min-lr 0.01 is not between 0 and --lr 0.001"),
        ("--lr-warmup-init 1e-2", "--lr-warmup-init 0.01 is not between"),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(flags: str, expected: str) -> None:
    assert expected in complaint(flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", None),
        ("--num-layers-per-virtual-pipeline-stage 1", 2),
        ("--num-layers-per-virtual-pipeline-stage 2", None),
        ("--num-virtual-stages-per-pipeline-rank 2", 2),
        ("--num-virtual-stages-per-pipeline-rank 1", None),
    ],
)
def test_virtual_stages_are_given_by_layers_or_by_number(flags: str, expected: int | None) -> None:
    assert plan(f"--pipeline-model-parallel-size 2 {flags}", world_size=2).virtual_pipeline_size == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num-virtual-stages-per-pipeline-rank 2", "need --pipeline-model-parallel-size 2"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "cannot be cut"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
            "--num-virtual-stages-per-pipeline-rank 2",
            "expected one of them",
        ),
    ],
)
def test_virtual_stages_that_cannot_be_are_refused(flags: str, expected: str) -> None:
    assert expected in complaint(flags, world_size=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", (1, 1, 1, 1)),
        ("2", (1, 0, 1, 0)),
        ("9", (1, 0, 0, 0)),
        ("([0]+[1]*3)", (0, 1, 1, 1)),
        ("[0, 1]*2", (0, 1, 0, 1)),
        (" 2*[1] + [0,0] ", (1, 1, 0, 0)),
    ],
)
def test_a_moe_pattern_has_an_entry_a_layer(text: str, expected: tuple[int, ...]) -> None:
    assert moe_layer_pattern(text, 4) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "x", "[1]", "[1]*5", "[2]*4", "[[1]]*4", "[1]*[4]", "[1]+1", "[1]*4.0", "'a'", "1\x00"),
        *("__import__('os')", "[1 for _ in range(4)]", "[1]**4", "True", "[True]*4", "(", "[1]*1000000000000"),
        *("1000000000*1000000000", "[1]*1000000*1000000"),
    ],
)
def test_any_other_moe_pattern_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--moe-layer-freq"):
        moe_layer_pattern(text, 4)
