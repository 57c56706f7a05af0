"""Claims about the settings dataclasses and how their fields become flags; Megatron-LM's defaults are the reference."""

import argparse
import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from megatron.training.arguments import build_parser
from megatron.training.config import SUBJECTS, Settings
from megatron.training.config.flag import FlagSpec, flag, flags_of
from megatron.training.megatron_flags import MEGATRON_FLAGS

SPECS = {name: spec for settings_type in SUBJECTS.values() for spec in flags_of(settings_type) for name in spec.names}

OUR_OWN = {"--metrics-file", "--log-state-digest", "--preflight-only"}
OLDER_SPELLINGS = {"--local_rank"}

# Megatron-LM's defaults in the form of the parsed value: a switch that clears (`--no-x`) has the default True.
# Three differ in form and not in meaning: there the choice "single" is made from None when data is loaded, "nccl" is
# written out (here None is also for machines without CUDA), and switches of three states start at None.
MEGATRON_DEFAULTS: dict[str, Any] = {
    # network
    **dict.fromkeys(("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--kv-channels")),
    "--group-query-attention": False,
    "--num-query-groups": 1,
    "--max-position-embeddings": None,
    "--position-embedding-type": "learned_absolute",
    "--use-rotary-position-embeddings": False,
    "--rotary-base": 10000,
    "--rotary-percent": 1.0,
    "--rotary-interleaved": False,
    "--no-position-embedding": True,
    "--make-vocab-size-divisible-by": 128,
    "--normalization": "LayerNorm",
    "--norm-epsilon": 1e-5,
    "--squared-relu": False,
    "--swiglu": False,
    "--untie-embeddings-and-output-weights": False,
    "--disable-bias-linear": True,
    "--add-qkv-bias": False,
    "--qk-layernorm": False,
    "--attention-dropout": 0.1,
    "--hidden-dropout": 0.1,
    "--transformer-impl": "transformer_engine",
    "--init-method-std": 0.02,
    "--init-method-xavier-uniform": False,
    "--no-initialization": True,
    "--use-cpu-initialization": False,
    "--attention-softmax-in-fp32": False,
    "--fp16-lm-cross-entropy": False,
    "--apply-query-key-layer-scaling": False,
    "--attention-backend": "auto",
    "--use-flash-attn": False,
    # optimizer
    "--weight-decay": 0.01,
    "--start-weight-decay": None,
    "--end-weight-decay": None,
    "--clip-grad": 1.0,
    "--weight-decay-incr-style": "constant",
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.999,
    "--adam-eps": 1e-8,
    "--sgd-momentum": 0.9,
    "--optimizer": "adam",
    "--lr": None,
    "--min-lr": 0.0,
    "--lr-warmup-init": 0.0,
    "--lr-decay-style": "linear",
    "--lr-wsd-decay-style": "exponential",
    "--lr-warmup-fraction": None,
    **dict.fromkeys(("--lr-decay-iters", "--lr-decay-samples", "--lr-wsd-decay-iters", "--lr-wsd-decay-samples")),
    "--lr-warmup-iters": 0,
    "--lr-warmup-samples": 0,
    **dict.fromkeys(("--override-opt_param-scheduler", "--override-opt-param-scheduler"), False),
    **dict.fromkeys(("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"), False),
    # run
    **dict.fromkeys(("--micro-batch-size", "--global-batch-size", "--rampup-batch-size", "--train-iters")),
    **dict.fromkeys(("--train-samples", "--exit-interval", "--exit-duration-in-mins", "--recompute-granularity")),
    **dict.fromkeys(("--recompute-method", "--recompute-num-layers", "--recompute-modules", "--loss-scale")),
    "--decrease-batch-size-if-needed": False,
    "--recompute-activations": False,
    "--exit-signal-handler": False,
    "--no-masked-softmax-fusion": True,
    "--no-bias-gelu-fusion": True,
    "--no-bias-swiglu-fusion": True,
    "--no-bias-dropout-fusion": True,
    "--no-rope-fusion": True,
    "--no-gradient-accumulation-fusion": True,
    "--no-persist-layer-norm": False,
    "--cross-entropy-loss-fusion": False,
    "--deterministic-mode": False,
    "--no-async-tensor-model-parallel-allreduce": False,
    "--use-mcore-models": False,
    "--manual-gc": False,
    "--no-check-for-nan-in-loss-and-grad": True,
    "--manual-gc-interval": 0,
    "--seed": 1234,
    "--data-parallel-random-init": False,
    "--fp16": False,
    "--bf16": False,
    "--initial-loss-scale": 2**32,
    "--min-loss-scale": 1.0,
    "--loss-scale-window": 1000,
    "--hysteresis": 2,
    "--skip-train": False,
    "--accumulate-allreduce-grads-in-fp32": False,
    "--eval-iters": 100,
    "--eval-interval": 1000,
    # parallelism
    **dict.fromkeys(("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"), 1),
    "--expert-model-parallel-size": 1,
    "--expert-tensor-parallel-size": None,
    "--sequence-parallel": False,
    **dict.fromkeys(("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")),
    **dict.fromkeys(("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")),
    "--microbatch-group-size-per-virtual-pipeline-stage": None,
    "--no-overlap-p2p-communication": True,
    "--distributed-backend": None,
    "--distributed-timeout-minutes": 10,
    "--overlap-grad-reduce": False,
    "--overlap-param-gather": False,
    "--no-align-grad-reduce": True,
    "--no-align-param-gather": True,
    "--ddp-bucket-size": None,
    "--ddp-num-buckets": None,
    "--ddp-average-in-collective": False,
    "--use-distributed-optimizer": False,
    "--local-rank": None,
    # checkpoints
    **dict.fromkeys(("--save", "--load", "--save-interval", "--persistent-save-interval", "--ckpt-step")),
    **dict.fromkeys(("--no-save-optim", "--no-save-rng", "--no-load-optim", "--no-load-rng", "--finetune"), False),
    "--exit-on-missing-checkpoint": False,
    "--use-dist-ckpt": False,
    "--use-checkpoint-args": False,
    "--async-save": False,
    "--ckpt-format": "torch_dist",
    "--no-ckpt-fully-parallel-save": True,
    "--ckpt-fully-parallel-load": False,
    "--ckpt-assume-constant-structure": False,
    # data
    **dict.fromkeys(("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--split")),
    **dict.fromkeys(("--data-cache-path", "--seq-length", "--vocab-size", "--vocab-file", "--merge-file")),
    "--tokenizer-type": None,
    "--tokenizer-model": None,
    "--mock-data": False,
    "--no-mmap-bin-files": True,
    "--num-workers": 2,
    "--dataloader-type": "single",
    "--num-dataset-builder-threads": 1,
    "--reset-position-ids": False,
    "--reset-attention-mask": False,
    "--eod-mask-loss": False,
    "--no-create-attention-mask-in-dataloader": True,
    # experts
    "--num-experts": None,
    "--moe-router-topk": 2,
    "--moe-router-load-balancing-type": "aux_loss",
    "--moe-aux-loss-coeff": 0.0,
    "--moe-z-loss-coeff": None,
    "--moe-token-dispatcher-type": "allgather",
    "--moe-ffn-hidden-size": None,
    "--moe-grouped-gemm": False,
    "--moe-layer-freq": "1",
    "--moe-shared-expert-intermediate-size": None,
    "--moe-router-dtype": None,
    "--moe-router-score-function": "softmax",
    "--moe-router-pre-softmax": False,
    "--moe-expert-capacity-factor": None,
    "--moe-pad-expert-input-to-capacity": False,
    "--moe-token-drop-policy": "probs",
    # logging
    "--log-interval": 100,
    "--tensorboard-dir": None,
    "--tensorboard-log-interval": 1,
    "--tensorboard-queue-size": 1000,
    "--log-params-norm": False,
    "--log-num-zeros-in-grad": False,
    "--log-throughput": False,
    "--yaml-cfg": None,
}


@pytest.mark.parametrize("name", sorted(SPECS.keys() - OUR_OWN - OLDER_SPELLINGS))
def test_the_default_is_megatrons(name: str) -> None:
    assert SPECS[name].default == MEGATRON_DEFAULTS[name]
    assert type(SPECS[name].default) is type(MEGATRON_DEFAULTS[name]) or SPECS[name].value_type is float


def test_the_table_names_no_flag_that_is_gone() -> None:
    assert MEGATRON_DEFAULTS.keys() <= SPECS.keys()


@pytest.mark.parametrize("settings_type", SUBJECTS.values())
def test_every_field_says_what_it_is_in_one_sentence_or_more(settings_type: type) -> None:
    assert len(flags_of(settings_type)) == len(dataclasses.fields(settings_type))
    for spec in flags_of(settings_type):
        assert spec.help[0].isupper() or spec.help.startswith("megatron-core")
        assert spec.help.endswith(".")


def test_no_two_fields_share_a_flag_or_a_destination() -> None:
    specs = [spec for settings_type in SUBJECTS.values() for spec in flags_of(settings_type)]
    names = Counter(name for spec in specs for name in spec.names)
    destinations = Counter(spec.field_name for spec in specs)
    assert max(names.values()) == 1
    assert max(destinations.values()) == 1


def test_no_flag_is_both_implemented_and_foreign() -> None:
    assert not SPECS.keys() & MEGATRON_FLAGS.keys()


def test_every_subject_is_a_frozen_dataclass_of_settings() -> None:
    settings = Settings()
    for subject, settings_type in SUBJECTS.items():
        part = getattr(settings, subject)
        assert type(part) is settings_type
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(settings_type)[0].name, None)


@pytest.mark.parametrize("spec", [spec for spec in SPECS.values() if spec.choices], ids=lambda spec: spec.names[0])
def test_a_default_is_one_of_the_choices(spec: FlagSpec) -> None:
    assert spec.choices is not None
    assert spec.default is None or spec.default in spec.choices


def test_the_parser_has_every_flag_and_nothing_else() -> None:
    parsed = {name for action in build_parser()._actions for name in action.option_strings}
    assert parsed == {*SPECS, "-h", "--help"}


def test_help_shows_every_flag() -> None:
    text = build_parser().format_help()
    assert all(name in text for name in SPECS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example:
    """Flags of every kind."""

    whole: int | None = None
    """A number,
    in two lines."""
    several: tuple[str, ...] | None = None
    """Several texts."""
    on_by_default: bool = flag(True, names=("--no-thing", "--off"))
    """A switch."""
    chosen: str = flag("a", choices=("a", "b"))
    """One of two."""


def test_a_field_becomes_a_flag_by_name_annotation_and_docstring() -> None:
    whole, several, switch, chosen = flags_of(_Example)
    assert (whole.names, whole.value_type, whole.many, whole.is_switch) == (("--whole",), int, False, False)
    assert whole.help == "A number, in two lines."
    assert (several.value_type, several.many) == (str, True)
    assert (switch.names, switch.is_switch, switch.default) == (("--no-thing", "--off"), True, True)
    assert chosen.choices == ("a", "b")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Undocumented:
    """A field without a word on it."""

    documented: int = 1
    """Something."""
    bare: int = 2


def test_a_field_without_a_docstring_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match=r"_Undocumented\.bare has no docstring"):
        flags_of(_Undocumented)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.is_switch])
def test_a_switch_flips_its_default(name: str) -> None:
    parser: argparse.ArgumentParser = build_parser()
    assert getattr(parser.parse_args([name]), SPECS[name].field_name) is not SPECS[name].default
