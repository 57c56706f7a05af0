"""Settings of the network: its shape, its initialisation, its experts. Megatron-LM's flag names and defaults."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.flag import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Shape and initialisation of the GPT model."""

    num_layers: int | None = None
    """Number of transformer layers. Required."""
    hidden_size: int | None = None
    """Width of the residual stream. Required."""
    ffn_hidden_size: int | None = None
    """Width of the MLP; 4 * hidden-size if not given (with --swiglu 8/3 of it, in steps of 64)."""
    num_attention_heads: int | None = None
    """Number of attention heads. Required."""
    kv_channels: int | None = None
    """Width of one head; hidden-size / num-attention-heads if not given."""
    group_query_attention: bool = False
    """Grouped-query attention with --num-query-groups groups."""
    num_query_groups: int = 1
    """Number of key and value heads with --group-query-attention."""
    max_position_embeddings: int | None = None
    """Longest sequence the position embeddings serve. Required."""
    position_embedding_type: str = flag("learned_absolute", choices=("learned_absolute", "rope", "none"))
    """Kind of position embedding."""
    use_rotary_position_embeddings: bool = False
    """Older name of --position-embedding-type rope."""
    rotary_base: int = 10000
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Part of each head that is rotated."""
    rotary_interleaved: bool = False
    """Rotate neighbouring channels instead of halves."""
    add_position_embedding: bool = flag(True, names=("--no-position-embedding",))
    """No learned position embedding; rotary ones stay."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    """Kind of normalisation."""
    norm_epsilon: float = 1e-5
    """Epsilon of the normalisation."""
    swiglu: bool = False
    """Gated linear units with SiLU instead of GELU."""
    squared_relu: bool = False
    """Squared ReLU instead of GELU."""
    untie_embeddings_and_output_weights: bool = False
    """The output layer has weights of its own."""
    add_bias_linear: bool = flag(True, names=("--disable-bias-linear",))
    """No biases in linear layers."""
    add_qkv_bias: bool = False
    """A bias in the QKV projection only."""
    qk_layernorm: bool = False
    """Normalise queries and keys."""
    attention_dropout: float = 0.1
    """Dropout of attention probabilities."""
    hidden_dropout: float = 0.1
    """Dropout of the residual stream."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    init_method_xavier_uniform: bool = False
    """Xavier's uniform initialisation instead of the normal one."""
    perform_initialization: bool = flag(True, names=("--no-initialization",))
    """Leave weights uninitialised (they come from a checkpoint)."""
    use_cpu_initialization: bool = False
    """Make the weights on the CPU, the same ones for any tensor-parallel size."""
    attention_softmax_in_fp32: bool = False
    """Softmax of the attention in fp32."""
    apply_query_key_layer_scaling: bool = False
    """Scale Q * K^T by 1 / layer number (fp16 only); turns the fp32 softmax on."""
    fp16_lm_cross_entropy: bool = False
    """The loss in 16 bits."""
    transformer_impl: str = flag("transformer_engine", choices=("local", "transformer_engine"))
    """Layers of transformer-engine or of megatron-core itself; without CUDA always the latter."""
    attention_backend: str = flag("auto", choices=("flash", "fused", "unfused", "local", "auto"))
    """Kernel of the attention, where transformer-engine gives a choice."""
    use_flash_attn: bool = False
    """Older wish for flash attention; --attention-backend decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSettings:
    """Mixture of experts."""

    num_experts: int | None = None
    """Number of experts of a MoE layer; none if not given."""
    moe_ffn_hidden_size: int | None = None
    """Width of one expert; ffn-hidden-size if not given."""
    moe_layer_freq: str = "1"
    """Every so many layers are MoE layers; or a pattern of zeros and ones such as "([0]+[1]*3)"."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of all shared experts together; no shared experts if not given."""
    moe_router_topk: int = 2
    """Experts a token."""
    moe_router_load_balancing_type: str = flag("aux_loss", choices=("aux_loss", "seq_aux_loss", "sinkhorn", "none"))
    """How the router is kept balanced."""
    moe_router_dtype: str | None = flag(None, choices=("fp32", "fp64"))
    """Precision of the router."""
    moe_router_score_function: str = flag("softmax", choices=("softmax", "sigmoid"))
    """What turns the router's logits into scores."""
    moe_router_pre_softmax: bool = False
    """Softmax before the top-k choice."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss."""
    moe_z_loss_coeff: float | None = None
    """Weight of the z-loss."""
    moe_token_dispatcher_type: str = flag("allgather", choices=("allgather", "alltoall", "flex"))
    """How tokens reach their experts."""
    moe_grouped_gemm: bool = False
    """All local experts in one kernel (CUDA only)."""
    moe_expert_capacity_factor: float | None = None
    """Capacity of an expert relative to its fair share; no limit if not given or negative."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad each expert's input to its capacity."""
    moe_token_drop_policy: str = flag("probs", choices=("probs", "position"))
    """Which tokens over the capacity are dropped."""
