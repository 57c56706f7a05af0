"""From a plan to megatron-core's own configuration objects. Called once a rank while the model is set up."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.training.layout import Plan


def params_dtype(plan: Plan) -> torch.dtype:
    """Data type of the model's parameters."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[plan.precision]


def transformer_config(plan: Plan) -> Any:
    """megatron-core's TransformerConfig for `plan`; fused kernels only where CUDA is."""
    model, parallel, run = plan.settings.model, plan.settings.parallel, plan.settings.run
    xavier = torch.nn.init.xavier_uniform_ if model.init_method_xavier_uniform else None
    options: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.kv_channels,
        "num_query_groups": model.num_query_groups,
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "rotary_interleaved": model.rotary_interleaved,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_method_std,
        "perform_initialization": model.perform_initialization,
        "use_cpu_initialization": model.use_cpu_initialization,
        "attention_softmax_in_fp32": model.attention_softmax_in_fp32,
        "apply_query_key_layer_scaling": model.apply_query_key_layer_scaling,
        "attention_backend": AttnBackend[model.attention_backend],
        "bf16": run.bf16,
        "fp16": run.fp16,
        "params_dtype": params_dtype(plan),
        "pipeline_dtype": params_dtype(plan),
        "deterministic_mode": run.deterministic_mode and plan.on_cuda,
        "recompute_granularity": run.recompute_granularity,
        "recompute_method": run.recompute_method,
        "recompute_num_layers": run.recompute_num_layers,
        "recompute_modules": list(run.recompute_modules) if run.recompute_modules else None,
        **_activation(plan),
        **_fusions(plan),
        **_layout(plan),
        **_experts(plan),
    }
    if xavier is not None:
        options |= {"init_method": xavier, "output_layer_init_method": xavier}
    config = TransformerConfig(**options)
    config.use_ring_exchange_p2p = False
    config.overlap_p2p_comm = parallel.overlap_p2p_comm and plan.virtual_pipeline_size is not None
    config.batch_p2p_comm = not config.overlap_p2p_comm
    return config


def _activation(plan: Plan) -> dict[str, Any]:
    model = plan.settings.model
    if model.swiglu:
        return {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if model.squared_relu:
        return {"activation_func": lambda x: torch.pow(torch.nn.functional.relu(x), 2)}
    return {}


def _fusions(plan: Plan) -> dict[str, Any]:
    run, model = plan.settings.run, plan.settings.model
    bias_activation = run.bias_swiglu_fusion if model.swiglu else run.bias_gelu_fusion
    wanted = {
        "gradient_accumulation_fusion": run.gradient_accumulation_fusion and _has("fused_weight_gradient_mlp_cuda"),
        "masked_softmax_fusion": run.masked_softmax_fusion and _has("scaled_masked_softmax_cuda"),
        "bias_activation_fusion": bias_activation and model.add_bias_linear and not model.squared_relu,
        "bias_dropout_fusion": run.bias_dropout_fusion,
        "apply_rope_fusion": run.apply_rope_fusion and uses_transformer_engine(plan),
        "persist_layer_norm": not run.no_persist_layer_norm and uses_transformer_engine(plan),
        "cross_entropy_loss_fusion": run.cross_entropy_loss_fusion,
    }
    return {name: value and plan.on_cuda for name, value in wanted.items()}


def _has(extension: str) -> bool:
    """Whether a compiled CUDA extension (of apex or Megatron-LM) can be imported."""
    return importlib.util.find_spec(extension) is not None


def _layout(plan: Plan) -> dict[str, Any]:
    parallel = plan.settings.parallel
    options: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": plan.virtual_pipeline_size,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "num_layers_in_first_pipeline_stage": parallel.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": parallel.decoder_last_pipeline_num_layers,
    }
    if parallel.microbatch_group_size_per_vp_stage is not None:
        options["microbatch_group_size_per_vp_stage"] = parallel.microbatch_group_size_per_vp_stage
    return options


def _experts(plan: Plan) -> dict[str, Any]:
    moe = plan.settings.moe
    if moe.num_experts is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.moe_ffn_hidden_size or plan.settings.model.ffn_hidden_size,
        "moe_layer_freq": list(plan.moe_layer_pattern),
        "moe_shared_expert_intermediate_size": moe.moe_shared_expert_intermediate_size,
        "moe_router_topk": moe.moe_router_topk,
        "moe_router_load_balancing_type": moe.moe_router_load_balancing_type,
        "moe_router_dtype": moe.moe_router_dtype,
        "moe_router_score_function": moe.moe_router_score_function,
        "moe_router_pre_softmax": moe.moe_router_pre_softmax,
        "moe_aux_loss_coeff": moe.moe_aux_loss_coeff,
        "moe_z_loss_coeff": moe.moe_z_loss_coeff,
        "moe_token_dispatcher_type": moe.moe_token_dispatcher_type,
        "moe_grouped_gemm": moe.moe_grouped_gemm,
        "moe_expert_capacity_factor": moe.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": moe.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": moe.moe_token_drop_policy,
    }


def uses_transformer_engine(plan: Plan) -> bool:
    """Whether layers come from transformer-engine: asked for (the default), CUDA there, and importable."""
    if not plan.on_cuda or plan.settings.model.transformer_impl != "transformer_engine":
        return False
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return False
    return True


def aligns_param_gather(plan: Plan) -> bool:
    """Whether stages start gathering together: only the interleaved schedule does, elsewhere each bucket's use does."""
    parallel = plan.settings.parallel
    return parallel.overlap_param_gather and parallel.align_param_gather and plan.virtual_pipeline_size is not None


def checks_for_nan(plan: Plan) -> bool:
    """Whether a loss or gradient that is not a number is an error; a dynamic loss scale meets them in good health."""
    run = plan.settings.run
    return run.check_for_nan_in_loss_and_grad and not (run.fp16 and run.loss_scale is None)


def ddp_config(plan: Plan) -> Any:
    """megatron-core's configuration of gradient buffers and their reduction."""
    parallel, run = plan.settings.parallel, plan.settings.run
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=run.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        align_param_gather=aligns_param_gather(plan),
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        check_for_nan_in_grad=checks_for_nan(plan),
        bucket_size=parallel.ddp_bucket_size,
        average_in_collective=parallel.ddp_average_in_collective,
    )


def optimizer_config(plan: Plan) -> Any:
    """megatron-core's configuration of the optimizer."""
    optimizer, run, parallel = plan.settings.optimizer, plan.settings.run, plan.settings.parallel
    return OptimizerConfig(
        optimizer=optimizer.optimizer,
        lr=optimizer.lr or 0.0,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        bf16=run.bf16,
        fp16=run.fp16,
        params_dtype=params_dtype(plan),
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        sgd_momentum=optimizer.sgd_momentum,
        clip_grad=optimizer.clip_grad,
        log_num_zeros_in_grad=plan.settings.logging.log_num_zeros_in_grad,
        loss_scale=run.loss_scale,
        initial_loss_scale=run.initial_loss_scale,
        min_loss_scale=run.min_loss_scale,
        loss_scale_window=run.loss_scale_window,
        hysteresis=run.hysteresis,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
    )
