"""How a run's ranks and batches are laid out: what the settings leave open is filled in here. Pure, no torch.

`resolve(settings, world_size, on_cuda)` gives the `Plan` that everything after it reads: derived sizes are
numbers, contradictions have been refused. Called by the preflight and by `pretrain()`.
"""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.training.config import SUBJECTS, DataSettings, ModelSettings, Settings, SettingsError
from megatron.training.config.flag import flags_of

_FROM_ZERO = (
    *("eval_iters", "eval_interval", "exit_interval", "seed", "num_workers", "local_rank", "manual_gc_interval"),
    *("lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples", "ckpt_step"),
)
"""Whole numbers that may be 0; all others are sizes or counts and start at 1."""

_ANY_SIGN = ("moe_expert_capacity_factor",)
"""Numbers that mean something below 0: here, no limit."""

_SEED_MAX = 2**31 - 1
"""Leaves room below 2**32, numpy's limit, for the offsets that ranks add."""

_LIST_LENGTH_MAX = 1 << 20
"""Of a --moe-layer-freq expression, so that a slip of the pen does not fill the memory."""

_MOCK_VOCABULARY = 1023


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that can start: full settings and the sizes derived from them.

    `virtual_pipeline_size` is None without interleaving. `moe_layer_pattern` has one entry a layer.
    `padded_vocab_size` is known once the tokenizer has been read (by the preflight), and 0 before.
    """

    settings: Settings
    world_size: int
    data_parallel_size: int
    virtual_pipeline_size: int | None
    global_batch_size: int
    train_iters: int
    train_samples: int
    moe_layer_pattern: tuple[int, ...]
    on_cuda: bool
    padded_vocab_size: int = 0

    @property
    def precision(self) -> str:
        """`"fp32"`, `"bf16"` or `"fp16"`."""
        return "bf16" if self.settings.run.bf16 else "fp16" if self.settings.run.fp16 else "fp32"

    @property
    def backend(self) -> str:
        """What carries collectives: `"trainmover"`, `"gloo"`, or `"nccl"`, the last on CUDA only."""
        asked = self.settings.parallel.distributed_backend
        if self.on_cuda:
            return asked or "nccl"
        return asked if asked == "gloo" else "trainmover"


def resolve(settings: Settings, *, world_size: int, on_cuda: bool) -> Plan:
    """The plan of `settings` on `world_size` ranks. Raises SettingsError, in one line, for what cannot be."""
    require_settings(settings)
    _check_ranges(settings)
    data_parallel_size = _data_parallel_size(settings, world_size)
    model = _full_model(settings.model)
    global_batch_size = _global_batch_size(settings, data_parallel_size)
    train_iters, train_samples = _length(settings, global_batch_size)
    return Plan(
        settings=dataclasses.replace(
            settings,
            model=model,
            parallel=_full_parallel(settings),
            run=_full_run(settings, global_batch_size),
            optimizer=_full_optimizer(settings, train_iters, train_samples),
            data=_full_data(settings.data),
            # Who only evaluates needs the weights alone.
            checkpoint=dataclasses.replace(
                settings.checkpoint, no_load_optim=settings.checkpoint.no_load_optim or settings.run.skip_train
            ),
        ),
        world_size=world_size,
        data_parallel_size=data_parallel_size,
        virtual_pipeline_size=_virtual_pipeline_size(settings),
        global_batch_size=global_batch_size,
        train_iters=train_iters,
        train_samples=train_samples,
        moe_layer_pattern=moe_layer_pattern(settings.moe.moe_layer_freq, model.num_layers or 0),
        on_cuda=on_cuda,
    )


def require_settings(settings: Settings) -> None:
    """SettingsError naming the flags without which nothing can start."""
    needed = {
        "--num-layers": settings.model.num_layers,
        "--hidden-size": settings.model.hidden_size,
        "--num-attention-heads": settings.model.num_attention_heads,
        "--max-position-embeddings": settings.model.max_position_embeddings,
        "--seq-length": settings.data.seq_length,
        "--micro-batch-size": settings.run.micro_batch_size,
    }
    absent = [name for name, value in needed.items() if value is None]
    if settings.optimizer.lr is None and not settings.run.skip_train:
        absent.append("--lr")
    if settings.run.train_iters is None and settings.run.train_samples is None:
        absent.append("--train-iters (or --train-samples)")
    if absent:
        raise SettingsError(f"required and not given: {', '.join(absent)}")


def _check_ranges(settings: Settings) -> None:
    """Sizes and counts start at 1 or 0, and no other number may be negative either."""
    for subject, settings_type in SUBJECTS.items():
        for spec in flags_of(settings_type):
            value = getattr(getattr(settings, subject), spec.field_name)
            if spec.value_type not in (int, float) or value is None or spec.field_name in _ANY_SIGN:
                continue
            least = 1 if spec.value_type is int and spec.field_name not in _FROM_ZERO else 0
            smallest = min(value) if spec.many else value
            if smallest < least:
                raise SettingsError(f"{spec.names[0]} is {smallest}, expected at least {least}")
    if settings.run.seed > _SEED_MAX:
        raise SettingsError(f"--seed is {settings.run.seed}, expected at most {_SEED_MAX}")


def _data_parallel_size(settings: Settings, world_size: int) -> int:
    parallel = settings.parallel
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    if world_size < 1 or world_size % (tp * pp * cp):
        raise SettingsError(
            f"found {world_size} ranks, expected a multiple of {tp * pp * cp} = tensor {tp} x pipeline {pp} x context "
            f"{cp}; start another number of ranks or change the parallel sizes"
        )
    return world_size // (tp * pp * cp)


def _full_model(model: ModelSettings) -> ModelSettings:
    hidden, heads = model.hidden_size or 0, model.num_attention_heads or 1
    if model.kv_channels is None and hidden % heads:
        raise SettingsError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}; "
            "change one or give --kv-channels"
        )
    default_ffn = (int(4 * hidden * 2 / 3) // 64) * 64 if model.swiglu else 4 * hidden
    with_learned = model.add_position_embedding
    position = "rope" if model.use_rotary_position_embeddings else model.position_embedding_type
    return dataclasses.replace(
        model,
        kv_channels=model.kv_channels or hidden // heads,
        ffn_hidden_size=model.ffn_hidden_size or default_ffn,
        num_query_groups=model.num_query_groups if model.group_query_attention else heads,
        position_embedding_type="none" if position == "learned_absolute" and not with_learned else position,
        attention_softmax_in_fp32=model.attention_softmax_in_fp32 or model.apply_query_key_layer_scaling,
    )


def _full_data(data: DataSettings) -> DataSettings:
    """With a tokenizer: Megatron-LM's usual one for real data, made-up words for made-up data."""
    kind, vocab_size = data.tokenizer_type, data.vocab_size
    if kind is None:
        kind = "NullTokenizer" if data.mock_data and data.vocab_file is None else "GPT2BPETokenizer"
        if kind == "NullTokenizer":
            vocab_size = vocab_size or _MOCK_VOCABULARY
    return dataclasses.replace(data, tokenizer_type=kind, vocab_size=vocab_size, split=data.split or "969,30,1")


def _full_parallel(settings: Settings) -> Any:
    parallel = settings.parallel
    return dataclasses.replace(
        parallel,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size,
    )


def _full_run(settings: Settings, global_batch_size: int) -> Any:
    run = settings.run
    granularity = "selective" if run.recompute_activations else run.recompute_granularity
    modules = run.recompute_modules or (("core_attn",) if granularity == "selective" else None)
    return dataclasses.replace(
        run,
        global_batch_size=global_batch_size,
        recompute_granularity=granularity,
        recompute_modules=modules,
        accumulate_allreduce_grads_in_fp32=run.accumulate_allreduce_grads_in_fp32 or run.bf16,
    )


def _global_batch_size(settings: Settings, data_parallel_size: int) -> int:
    run = settings.run
    micro = run.micro_batch_size or 1
    step = micro * data_parallel_size
    size = run.global_batch_size or step
    if size > step and run.decrease_batch_size_if_needed:
        size -= size % step
    if size % step:
        raise SettingsError(
            f"--global-batch-size {size} is not a multiple of {step} = --micro-batch-size {micro} x "
            f"{data_parallel_size} data-parallel ranks; change one of them"
        )
    if run.rampup_batch_size is not None:
        _check_rampup(run.rampup_batch_size, size, step)
    return size


def _check_rampup(rampup: tuple[int, ...], global_batch_size: int, step: int) -> None:
    if len(rampup) != 3:
        raise SettingsError("--rampup-batch-size wants three positive numbers: START INCREMENT SAMPLES")
    start, increment, _ = rampup
    if (global_batch_size - start) % increment or start >= global_batch_size:
        raise SettingsError(
            f"--rampup-batch-size: from {start} to {global_batch_size} is not a whole number of steps of {increment}, "
            "one or more"
        )
    if start % step or increment % step:
        raise SettingsError(f"--rampup-batch-size: {start} and {increment} must be multiples of {step}")


def _length(settings: Settings, global_batch_size: int) -> tuple[int, int]:
    """(iterations, samples) of the run; with a ramp-up the iterations of --train-samples are counted exactly."""
    run = settings.run
    if run.train_iters is not None and run.train_samples is not None:
        raise SettingsError("found both --train-iters and --train-samples, expected one; leave one out")
    if run.train_iters is not None:  # with a ramp-up fewer samples are consumed: an upper bound
        return run.train_iters, run.train_iters * global_batch_size
    samples = run.train_samples or 0
    iterations = _iterations_for(samples, run.rampup_batch_size, global_batch_size)
    if iterations == 0:
        raise SettingsError(f"--train-samples {samples} is less than the first batch; raise it")
    return iterations, samples


def _iterations_for(samples: int, rampup: tuple[int, ...] | None, global_batch_size: int) -> int:
    """Iterations that `samples` are enough for, by megatron-core's arithmetic of the ramp-up."""
    consumed = iterations = 0
    if rampup is not None:
        start, increment, ramp_samples = rampup
        samples_a_step = ramp_samples / ((global_batch_size - start) // increment)
        while consumed <= ramp_samples:
            consumed += start + int(consumed / samples_a_step) * increment
            if consumed > samples:  # the last batch would lack samples: it is left out, as without a ramp-up
                return iterations
            iterations += 1
    return iterations + (samples - consumed) // global_batch_size


def _full_optimizer(settings: Settings, train_iters: int, train_samples: int) -> Any:
    optimizer, by_samples = settings.optimizer, settings.run.train_samples is not None
    unit, other = ("samples", "iters") if by_samples else ("iters", "samples")
    for name in (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}"):
        if getattr(optimizer, name):
            raise SettingsError(f"--{name.replace('_', '-')} does not go with --train-{unit}; give it in {unit}")
    filled = dataclasses.replace(
        optimizer,
        lr_decay_iters=optimizer.lr_decay_iters or train_iters,
        lr_decay_samples=optimizer.lr_decay_samples or train_samples,
        start_weight_decay=optimizer.weight_decay
        if optimizer.start_weight_decay is None
        else optimizer.start_weight_decay,
        end_weight_decay=optimizer.weight_decay if optimizer.end_weight_decay is None else optimizer.end_weight_decay,
    )
    decay = filled.lr_decay_samples if by_samples else filled.lr_decay_iters
    warmup: float = filled.lr_warmup_samples if by_samples else filled.lr_warmup_iters
    if filled.lr_warmup_fraction is not None:
        if warmup:
            raise SettingsError("found --lr-warmup-fraction and a fixed warm-up, expected one of them")
        warmup = filled.lr_warmup_fraction * (decay or 0)
    if decay and warmup >= decay:
        raise SettingsError(f"the warm-up ({warmup:g}) is not shorter than the decay ({decay}); shorten it")
    for flag, rate in (("--min-lr", filled.min_lr), ("--lr-warmup-init", filled.lr_warmup_init)):
        if rate > (filled.lr or 0.0):
            raise SettingsError(f"{flag} {rate} is not between 0 and --lr {filled.lr}")
    return filled


def _virtual_pipeline_size(settings: Settings) -> int | None:
    parallel, layers = settings.parallel, settings.model.num_layers or 0
    by_layers, by_stages = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    if by_layers is None and by_stages is None:
        return None
    if by_layers is not None and by_stages is not None:
        raise SettingsError(
            "found --num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank, "
            "expected one of them"
        )
    stages = parallel.pipeline_model_parallel_size
    if stages < 2:
        raise SettingsError("virtual pipeline stages need --pipeline-model-parallel-size 2 or more")
    if by_stages is not None:
        return by_stages if by_stages > 1 else None
    per_rank = layers // stages
    if layers % stages or by_layers is None or by_layers < 1 or per_rank % by_layers:
        raise SettingsError(
            f"--num-layers {layers} over {stages} stages cannot be cut into virtual stages of {by_layers} layers"
        )
    return per_rank // by_layers if per_rank > by_layers else None


def moe_layer_pattern(text: str, num_layers: int) -> tuple[int, ...]:
    """One 0 or 1 a layer from --moe-layer-freq: a number N (every Nth from the first), or a list expression."""
    try:
        value = _list_expression(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise SettingsError(f"--moe-layer-freq {text!r}: expected a number or a list such as ([0]+[1]*3)") from error
    if isinstance(value, int):
        if value < 1:
            raise SettingsError(f"--moe-layer-freq {value}: expected at least 1")
        return tuple(1 if layer % value == 0 else 0 for layer in range(num_layers))
    if len(value) != num_layers or any(entry not in (0, 1) for entry in value):
        raise SettingsError(
            f"--moe-layer-freq: found {len(value)} entries, expected {num_layers} of 0 or 1, one a layer"
        )
    return tuple(value)


def _list_expression(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_list_expression(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _list_expression(node.left), _list_expression(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        lengths = [len(side) if isinstance(side, list) else side for side in (left, right)]
        if lengths[0] * lengths[1] > _LIST_LENGTH_MAX:
            raise ValueError("a list too long")
        return left * right
    raise ValueError("not a list expression")
