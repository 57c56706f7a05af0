"""What a checkpoint tells of the run that wrote it, and whether another run can go on from it. Pure, no torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.training.checkpoint_files import Checkpoint
from megatron.training.config import ModelSettings, MoeSettings, Settings, SettingsError
from megatron.training.config.flag import flags_of
from megatron.training.layout import Plan

# What makes two models another model: names in ModelSettings and MoeSettings.
_SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
    *("max_position_embeddings", "position_embedding_type", "normalization", "swiglu", "squared_relu"),
    *("untie_embeddings_and_output_weights", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
    *("rotary_base", "rotary_percent", "rotary_interleaved", "num_experts", "moe_ffn_hidden_size", "moe_layer_freq"),
    *("moe_shared_expert_intermediate_size", "moe_router_topk"),
)
_FREE_WITHOUT_LEARNED_POSITIONS = "max_position_embeddings"


def facts_of(plan: Plan, *, consumed_train_samples: int) -> dict[str, Any]:
    """Facts for the manifest of a checkpoint: model, layout, precision, schedule, position in the data."""
    parallel = plan.settings.parallel
    return {
        "model": {**model_shape(plan), "padded_vocab_size": plan.padded_vocab_size},
        "layout": {
            "tensor": parallel.tensor_model_parallel_size,
            "pipeline": parallel.pipeline_model_parallel_size,
            "virtual_pipeline": plan.virtual_pipeline_size,
            "data": plan.data_parallel_size,
            "expert": parallel.expert_model_parallel_size,
            "expert_tensor": parallel.expert_tensor_parallel_size,
            "context": parallel.context_parallel_size,
        },
        "optimizer": {
            "kind": plan.settings.optimizer.optimizer,
            "distributed": parallel.use_distributed_optimizer,
            "saved": not plan.settings.checkpoint.no_save_optim,
        },
        "rng_saved": not plan.settings.checkpoint.no_save_rng,
        "precision": plan.precision,
        "schedule": schedule_of(plan),
        "consumed_train_samples": consumed_train_samples,
    }


def model_shape(plan: Plan) -> dict[str, Any]:
    """The settings that decide the names and shapes of the model's parameters."""
    values = {**dataclasses.asdict(plan.settings.model), **dataclasses.asdict(plan.settings.moe)}
    return {name: values[name] for name in _SHAPE}


def schedule_of(plan: Plan) -> dict[str, Any]:
    """The course of learning rate and weight decay, in samples, as the scheduler compares it when resuming."""
    optimizer, batch = plan.settings.optimizer, plan.global_batch_size
    by_samples = plan.settings.run.train_samples is not None
    decay = optimizer.lr_decay_samples if by_samples else (optimizer.lr_decay_iters or 0) * batch
    warmup: float = optimizer.lr_warmup_samples if by_samples else optimizer.lr_warmup_iters * batch
    if optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * (decay or 0)
    wsd = optimizer.lr_wsd_decay_samples if by_samples else (optimizer.lr_wsd_decay_iters or 0) * batch
    return {
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "decay_style": optimizer.lr_decay_style,
        "decay_samples": decay,
        "warmup_samples": warmup,
        "wsd_decay_samples": wsd or None,
        "start_weight_decay": optimizer.start_weight_decay,
        "end_weight_decay": optimizer.end_weight_decay,
        "weight_decay_style": optimizer.weight_decay_incr_style,
        "weight_decay_samples": 1 if optimizer.weight_decay_incr_style == "constant" else plan.train_samples,
    }


def check_resume(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raises SettingsError when `plan` cannot go on from `checkpoint`: other model, optimizer or schedule."""
    _require_facts(checkpoint)
    saved, settings = checkpoint.facts, plan.settings
    for name, value in model_shape(plan).items():
        if name == _FREE_WITHOUT_LEARNED_POSITIONS and settings.model.position_embedding_type != "learned_absolute":
            continue
        if saved["model"].get(name) != value:
            raise SettingsError(
                f"{checkpoint.folder} is of another model: {name.replace('_', '-')} is {saved['model'].get(name)} "
                f"there, {value} here; load another folder, or make the settings agree"
            )
    _check_vocabulary(plan, checkpoint)
    if settings.checkpoint.finetune:
        return
    loads_optimizer = not settings.checkpoint.no_load_optim
    if loads_optimizer and not saved["optimizer"]["saved"]:
        raise SettingsError(f"{checkpoint.folder} holds no optimizer state; add --no-load-optim or --finetune")
    wanted = {"kind": settings.optimizer.optimizer, "distributed": settings.parallel.use_distributed_optimizer}
    for name, value in wanted.items():
        if loads_optimizer and saved["optimizer"][name] != value:
            raise SettingsError(
                f"{checkpoint.folder} has optimizer {name}={saved['optimizer'][name]}, expected {value}; "
                "make the settings agree, or add --no-load-optim"
            )
    if loads_optimizer and saved["precision"] != plan.precision:
        raise SettingsError(
            f"{checkpoint.folder} was trained in {saved['precision']}, this run is {plan.precision}; "
            "make them agree, or add --no-load-optim"
        )
    if loads_optimizer:
        _check_schedule(plan, checkpoint)


def _check_vocabulary(plan: Plan, checkpoint: Checkpoint) -> None:
    """The embedding's rows must be equal, padding included: added rows would take part in the softmax untrained."""
    rows, tensor = checkpoint.facts["model"].get("padded_vocab_size"), plan.settings.parallel.tensor_model_parallel_size
    if rows != plan.padded_vocab_size:
        raise SettingsError(
            f"{checkpoint.folder} is of another vocabulary: {rows} rows there, {plan.padded_vocab_size} here; give the "
            f"tokenizer it was trained with, and a --make-vocab-size-divisible-by that pads to as many on {tensor} "
            "tensor-parallel ranks"
        )


def _require_facts(checkpoint: Checkpoint) -> None:
    """SettingsError unless the manifest has all parts that the checks below read."""
    saved, parts = checkpoint.facts, ("model", "layout", "optimizer", "schedule")
    broken = [name for name in parts if not isinstance(saved.get(name), dict)]
    broken += [name for name in ("kind", "distributed", "saved") if not broken and name not in saved["optimizer"]]
    broken += [name for name in ("precision", "rng_saved") if name not in saved]
    if broken:
        raise SettingsError(f"{checkpoint.folder} does not say its {broken[0]}; another version wrote it, load another")


def _check_schedule(plan: Plan, checkpoint: Checkpoint) -> None:
    optimizer, saved = plan.settings.optimizer, checkpoint.facts["schedule"]
    if optimizer.override_opt_param_scheduler or optimizer.use_checkpoint_opt_param_scheduler:
        return
    for name, value in schedule_of(plan).items():
        if saved.get(name) != value:
            raise SettingsError(
                f"{checkpoint.folder} has another schedule: {name} is {saved.get(name)} there, {value} here; make them "
                "agree (--lr-decay-iters fixes it when the run gets longer), or add --override-opt_param-scheduler"
            )


def same_layout(plan: Plan, checkpoint: Checkpoint) -> bool:
    """Whether `checkpoint` was written by the same layout, so that each rank's random state is its own."""
    return bool(checkpoint.facts["layout"] == facts_of(plan, consumed_train_samples=0)["layout"])


def with_checkpoint_shape(settings: Settings, checkpoint: Checkpoint) -> Settings:
    """`settings` with the model's shape taken from `checkpoint` (--use-checkpoint-args)."""
    _require_facts(checkpoint)
    saved = checkpoint.facts["model"]
    types = {spec.field_name: spec.value_type for part in (ModelSettings, MoeSettings) for spec in flags_of(part)}
    for name in _SHAPE:
        value = saved.get(name, "nothing")
        if value is not None and type(value) not in (types[name], int if types[name] is float else types[name]):
            raise SettingsError(f"{checkpoint.folder}: its {name} is {value!r}; leave --use-checkpoint-args out")

    def taken(part: ModelSettings | MoeSettings) -> Any:
        names = {field.name for field in dataclasses.fields(part)}
        shape = {name: saved[name] for name in _SHAPE if name in names}
        if isinstance(part, ModelSettings):
            shape["group_query_attention"] = saved["num_query_groups"] != saved["num_attention_heads"]
        return dataclasses.replace(part, **shape)

    return dataclasses.replace(settings, model=taken(settings.model), moe=taken(settings.moe))
