"""Claims about what a plan must satisfy; each rule is one that megatron-core, or the trainer, would break on later."""

import pytest

from megatron.training.arguments import parse_settings
from megatron.training.config import SettingsError
from megatron.training.layout import Plan, resolve
from megatron.training.validation import check_plan, warnings_of

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3"
)
TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
INTERLEAVED = f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2"
ALLTOALL_OVER_GLOO = "--moe-token-dispatcher-type alltoall --distributed-backend gloo"
EXPERTS = "--num-experts 4 --disable-bias-linear"


def plan(more: str, *, world_size: int = 1, on_cuda: bool = False, data: str = "--mock-data") -> Plan:
    return resolve(parse_settings(f"{BASE} {data} {more}".split()), world_size=world_size, on_cuda=on_cuda)


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ("--seq-length 65", 1, "longer than --max-position-embeddings 64"),
        (f"{TP} 3 --num-attention-heads 4", 3, "--num-attention-heads 4 is not a multiple of"),
        (f"{TP} 2 --ffn-hidden-size 65", 2, "--ffn-hidden-size 65 is not a multiple of"),
        ("--hidden-size 16 --num-attention-heads 1 --swiglu", 1, "--ffn-hidden-size 0"),
        ("--group-query-attention --num-query-groups 3", 1, "not a multiple of --num-query-groups 3"),
        (
            f"{TP} 4 --num-attention-heads 12 --kv-channels 8 --group-query-attention --num-query-groups 3",
            4,
            "neither a multiple nor a divisor",
        ),
        (f"{TP} 4 --sequence-parallel --seq-length 62", 4, "--seq-length 62 is not a multiple of 4"),
        ("--squared-relu --swiglu", 1, "--squared-relu and --swiglu"),
        ("--hidden-dropout 1", 1, "below 1"),
        ("--attention-dropout 1.5", 1, "below 1"),
        ("--position-embedding-type rope --rotary-percent 1.5", 1, "--rotary-percent is 1.5"),
        ("--position-embedding-type rope --rotary-percent 0", 1, "--rotary-percent is 0"),
        (f"{PP} 3", 3, "--num-layers 4 does not divide into 3 stages; change one, or name the ends"),
        (f"{PP} 2 --num-virtual-stages-per-pipeline-rank 3", 2, "2 stages x 3 virtual stages"),
        ("--decoder-first-pipeline-num-layers 1", 1, "uneven pipeline needs"),
        (f"{PP} 2 --decoder-first-pipeline-num-layers 4", 2, "leaves 0 layers for 1 stages"),
        (f"{PP} 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1", 2, "for 0 stages"),
        (f"{PP} 3 --decoder-first-pipeline-num-layers 1", 3, "leaves 3 layers for 2 stages"),
        (f"{PP} 2 --decoder-first-pipeline-num-layers 5", 2, "leaves -1 layers"),
        (f"{INTERLEAVED} --decoder-first-pipeline-num-layers 1", 2, "multiples of the 2 virtual stages"),
        (
            f"{PP} 3 --num-virtual-stages-per-pipeline-rank 2 --num-layers 7 --decoder-first-pipeline-num-layers 2 "
            "--decoder-last-pipeline-num-layers 2 --global-batch-size 6",
            3,
            "the middle stages must be multiples of the 2",
        ),
        (INTERLEAVED, 2, "found 1 microbatches in groups of 2"),
        (f"{INTERLEAVED} --global-batch-size 6", 2, "found 3 microbatches"),
        (f"{INTERLEAVED} --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 1", 2, "groups of 1"),
        (f"{INTERLEAVED} --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 5", 2, "groups of 5"),
        (f"{INTERLEAVED} --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 3", 2, "groups of 3"),
        (f"{INTERLEAVED} --global-batch-size 8 --rampup-batch-size 4 2 8", 2, "found 3 microbatches"),
        ("--overlap-param-gather --overlap-grad-reduce", 1, "needs --use-distributed-optimizer"),
        ("--overlap-param-gather --use-distributed-optimizer", 1, "needs --overlap-grad-reduce"),
        ("--recompute-granularity full", 1, "needs --recompute-method"),
        ("--recompute-granularity full --recompute-method block", 1, "and --recompute-num-layers"),
        ("--recompute-granularity selective --recompute-num-layers 1", 1, "needs --recompute-granularity full"),
        ("--recompute-modules mlp", 1, "needs --recompute-granularity selective"),
        ("--recompute-activations --recompute-modules mla_up_proj", 1, "expected some of core_attn"),
        ("--recompute-activations --recompute-modules moe_act", 1, "needs --moe-grouped-gemm"),
        ("--recompute-activations --recompute-modules mlp", 1, "never ends"),
        ("--fp16 --bf16", 1, "found --fp16 and --bf16"),
        ("--apply-query-key-layer-scaling --bf16", 1, "needs --fp16"),
        ("--fp16-lm-cross-entropy --bf16", 1, "needs --fp16"),
        ("--lr-decay-style WSD", 1, "needs --lr-wsd-decay-iters"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 11", 1, "at most the decay's 10"),
        ("--start-weight-decay 0.0 --end-weight-decay 0.1", 1, "--weight-decay-incr-style linear or cosine"),
        ("--start-weight-decay 0.1 --end-weight-decay 0 --weight-decay-incr-style linear", 1, "not below the start"),
        ("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", 1, "expected one of them"),
        ("--adam-beta2 1", 1, "must be below 1"),
        ("--expert-model-parallel-size 2", 2, "needs --num-experts"),
        (f"{EXPERTS} --expert-model-parallel-size 3", 3, "--num-experts 4 is not a multiple"),
        (f"{EXPERTS} --expert-model-parallel-size 4", 2, "2 ranks a stage are not a multiple of expert size 4"),
        (f"{EXPERTS} --moe-router-topk 5", 1, "more than --num-experts 4"),
        (f"{EXPERTS} --moe-router-topk 1", 1, "needs --moe-router-pre-softmax"),
        (f"{EXPERTS} {TP} 2", 2, "need --sequence-parallel"),
        (f"--num-experts 4 {TP} 2 --sequence-parallel", 2, "cannot have biases"),
        (f"{EXPERTS} {TP} 2 --sequence-parallel --moe-ffn-hidden-size 5", 2, "--moe-ffn-hidden-size 5"),
        (
            f"{EXPERTS} {TP} 2 --sequence-parallel --moe-shared-expert-intermediate-size 5",
            2,
            "--moe-shared-expert-intermediate-size 5",
        ),
        (f"{EXPERTS} --moe-pad-expert-input-to-capacity", 1, "needs --moe-expert-capacity-factor"),
        (
            f"{EXPERTS} --moe-expert-capacity-factor 1 --moe-router-load-balancing-type sinkhorn",
            1,
            "does not go with",
        ),
    ],
)
@pytest.mark.parametrize("on_cuda", [False, True])
def test_a_plan_that_would_break_later_is_refused(flags: str, world_size: int, expected: str, on_cuda: bool) -> None:
    with pytest.raises(SettingsError) as caught:
        check_plan(plan(flags, world_size=world_size, on_cuda=on_cuda))
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--context-parallel-size 2", "--context-parallel-size 2 needs CUDA"),
        (f"{EXPERTS} --moe-grouped-gemm", "--moe-grouped-gemm needs CUDA"),
        (f"{EXPERTS} --moe-token-dispatcher-type flex", "flex needs CUDA"),
        (f"{EXPERTS} {TP} 2 --sequence-parallel {ALLTOALL_OVER_GLOO}", "gloo lacks"),
        ("--cross-entropy-loss-fusion", "--cross-entropy-loss-fusion needs CUDA"),
    ],
)
def test_what_needs_cuda_is_refused_without_it_alone(flags: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        check_plan(plan(flags, world_size=2))
    check_plan(plan(flags, world_size=2, on_cuda=True))


def test_context_parallel_ranks_take_two_parts_each() -> None:
    with pytest.raises(SettingsError, match=r"--seq-length 62 is not a multiple of 4 = 2 x"):
        check_plan(plan("--context-parallel-size 2 --seq-length 62", world_size=2, on_cuda=True))
    check_plan(plan("--context-parallel-size 2 --seq-length 60", world_size=2, on_cuda=True))


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        (f"{TP} 4 --group-query-attention --num-query-groups 2", 4),
        (f"{PP} 3 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1", 3),
        (f"{PP} 2 --decoder-first-pipeline-num-layers 1", 2),
        (f"{PP} 2 --decoder-last-pipeline-num-layers 3", 2),
        (f"{PP} 2 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1", 2),
        (f"{INTERLEAVED} --global-batch-size 8", 2),
        (f"{INTERLEAVED} --global-batch-size 10 --microbatch-group-size-per-virtual-pipeline-stage 3", 2),
        (f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", 2),
        (f"{EXPERTS} --moe-expert-capacity-factor -1", 1),
        (f"--num-experts 4 {TP} 2 --sequence-parallel --expert-tensor-parallel-size 1", 2),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 4", 1),
        ("--start-weight-decay 0 --end-weight-decay 0.1 --weight-decay-incr-style cosine", 1),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
        ("--recompute-activations --recompute-modules mlp layernorm --disable-bias-linear", 1),
        ("--skip-train", 1),
    ],
)
def test_a_plan_that_works_is_taken(flags: str, world_size: int) -> None:
    check_plan(plan(flags, world_size=world_size))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("", "no data"),
        ("--data-path a --train-data-path b --vocab-file v --merge-file m", "expected one kind"),
        ("--mock-data --data-path a --vocab-file v --merge-file m", "--mock-data and paths of real data"),
        ("--valid-data-path a --vocab-file v --merge-file m", "give --train-data-path too"),
        ("--data-path a", "needs --vocab-file and --merge-file"),
        ("--data-path a --vocab-file v", "needs --vocab-file and --merge-file"),
        ("--data-path a --tokenizer-model m", "or another --tokenizer-type"),
    ],
)
def test_data_is_named_once_and_has_a_tokenizer(data: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        check_plan(plan("", data=data))


def test_only_wishes_that_are_answered_otherwise_are_told() -> None:
    wishes = "--distributed-backend nccl --no-create-attention-mask-in-dataloader --use-flash-attn"
    lines = warnings_of(plan(wishes))
    assert [line.split(":")[0] for line in lines] == [
        "--distributed-backend nccl needs CUDA",
        "--no-create-attention-mask-in-dataloader",
        "flash attention needs CUDA",
    ]
    assert warnings_of(plan("--attention-backend fused"))
    assert warnings_of(plan(wishes, on_cuda=True)) == ()
    assert warnings_of(plan("")) == ()
