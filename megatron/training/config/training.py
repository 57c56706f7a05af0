"""Settings of the run: batches, length, precision, recompute, optimizer and learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.flag import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Batch sizes, length of the run, when it ends, precision and recompute."""

    micro_batch_size: int | None = None
    """Samples of one forward pass of one rank. Required."""
    global_batch_size: int | None = None
    """Samples of one iteration; micro-batch-size times data-parallel size if not given."""
    rampup_batch_size: tuple[int, ...] | None = None
    """START INCREMENT SAMPLES: the global batch grows from START by INCREMENT over SAMPLES samples."""
    decrease_batch_size_if_needed: bool = False
    """Round the global batch down to what the data-parallel size divides."""
    train_iters: int | None = None
    """Iterations to train; either this or --train-samples."""
    train_samples: int | None = None
    """Samples to train on; either this or --train-iters."""
    exit_interval: int | None = None
    """Save and exit when the iteration is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and exit after so many minutes."""
    exit_signal_handler: bool = False
    """Save and exit at the next iteration boundary on SIGTERM or SIGUSR1."""
    eval_iters: int = 100
    """Iterations of one evaluation; 0 for none."""
    eval_interval: int = 1000
    """Iterations between evaluations."""
    skip_train: bool = False
    """Evaluate only."""
    seed: int = 1234
    """Seed of weights, dropout and data order."""
    data_parallel_random_init: bool = False
    """Different initial weights on different data-parallel ranks."""
    fp16: bool = False
    """Train in fp16 with loss scaling."""
    bf16: bool = False
    """Train in bf16."""
    loss_scale: float | None = None
    """Fixed loss scale for fp16; dynamic if not given."""
    initial_loss_scale: float = 2.0**32
    """First dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Smallest dynamic loss scale."""
    loss_scale_window: float = 1000
    """Good iterations before the loss scale doubles."""
    hysteresis: int = 2
    """Bad iterations before the loss scale halves."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32; bf16 always does."""
    check_for_nan_in_loss_and_grad: bool = flag(True, names=("--no-check-for-nan-in-loss-and-grad",))
    """Go on when a loss or gradient is not a number."""
    recompute_activations: bool = False
    """Older name of --recompute-granularity selective."""
    recompute_granularity: str | None = flag(None, choices=("full", "selective"))
    """Recompute whole layers or chosen parts in the backward pass."""
    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """How layers are chosen with full recompute."""
    recompute_num_layers: int | None = None
    """Layers of one unit of full recompute."""
    recompute_modules: tuple[str, ...] | None = None
    """Parts of selective recompute: core_attn, layernorm, mlp, moe, moe_act, shared_experts."""
    masked_softmax_fusion: bool = flag(True, names=("--no-masked-softmax-fusion",))
    """No fused softmax (CUDA only)."""
    bias_gelu_fusion: bool = flag(True, names=("--no-bias-gelu-fusion",))
    """No fused bias and GELU (CUDA only)."""
    bias_swiglu_fusion: bool = flag(True, names=("--no-bias-swiglu-fusion",))
    """No fused bias and SwiGLU (CUDA only)."""
    bias_dropout_fusion: bool = flag(True, names=("--no-bias-dropout-fusion",))
    """No fused bias and dropout (CUDA only)."""
    apply_rope_fusion: bool = flag(True, names=("--no-rope-fusion",))
    """No fused rotary embedding (CUDA only)."""
    gradient_accumulation_fusion: bool = flag(True, names=("--no-gradient-accumulation-fusion",))
    """No fused gradient accumulation (CUDA only)."""
    no_persist_layer_norm: bool = False
    """No persistent layer-norm kernel (CUDA only)."""
    cross_entropy_loss_fusion: bool = False
    """Fused cross entropy (CUDA only)."""
    no_async_tensor_model_parallel_allreduce: bool = False
    """Accepted for old command lines; without effect, as in Megatron-LM."""
    use_mcore_models: bool = False
    """Accepted for old command lines; megatron-core's models are the only ones."""
    deterministic_mode: bool = False
    """Choose deterministic kernels; on the CPU everything is."""
    manual_gc: bool = False
    """Collect garbage only at chosen iterations."""
    manual_gc_interval: int = 0
    """Iterations between collections with --manual-gc; 0 for never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The optimizer, the learning rate's course and the weight decay."""

    optimizer: str = flag("adam", choices=("adam", "sgd"))
    """Kind of optimizer; adam decouples its weight decay."""
    lr: float | None = None
    """Highest learning rate. Required."""
    min_lr: float = 0.0
    """Lowest learning rate after the decay."""
    lr_decay_style: str = flag("linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"))
    """Course of the learning rate after the warm-up."""
    lr_wsd_decay_style: str = flag("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"))
    """Course of the last part of the WSD schedule."""
    lr_decay_iters: int | None = None
    """Iterations until the lowest rate; train-iters if not given."""
    lr_decay_samples: int | None = None
    """Samples until the lowest rate; train-samples if not given."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the last part of the WSD schedule."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the last part of the WSD schedule."""
    lr_warmup_fraction: float | None = None
    """Part of the decay that is warm-up."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up."""
    lr_warmup_init: float = 0.0
    """First learning rate of the warm-up."""
    override_opt_param_scheduler: bool = flag(
        False, names=("--override-opt_param-scheduler", "--override-opt-param-scheduler")
    )
    """The command line's schedule replaces the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, names=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler")
    )
    """The checkpoint's schedule replaces the command line's."""
    weight_decay: float = 0.01
    """Weight decay."""
    start_weight_decay: float | None = None
    """First weight decay, when it grows."""
    end_weight_decay: float | None = None
    """Last weight decay, when it grows."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """Course of the weight decay."""
    clip_grad: float = 1.0
    """Largest norm of the gradient; 0 for no clipping."""
    adam_beta1: float = 0.9
    """Adam's first coefficient."""
    adam_beta2: float = 0.999
    """Adam's second coefficient."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
