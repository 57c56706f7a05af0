"""Settings of the layout: how the model and the batch are spread over ranks, and how ranks talk."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.flag import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """Sizes of the parallel dimensions and what overlaps with what."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = 1
    """Stages of consecutive layers."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first stage, when stages are uneven."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last stage, when stages are uneven."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleaved schedule: layers of one virtual stage."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Interleaved schedule: virtual stages a rank."""
    microbatch_group_size_per_vp_stage: int | None = flag(
        None, names=("--microbatch-group-size-per-virtual-pipeline-stage",)
    )
    """Interleaved schedule: microbatches in a row for one virtual stage."""
    overlap_p2p_comm: bool = flag(True, names=("--no-overlap-p2p-communication",))
    """Batch the pipeline's sends and receives instead of overlapping them."""
    sequence_parallel: bool = False
    """Spread norms and dropout over the tensor-parallel ranks too."""
    context_parallel_size: int = 1
    """Ranks that share each sequence (CUDA only)."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: int | None = None
    """Tensor-parallel size of experts; the model's if not given."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather parameters while the forward pass already runs (distributed optimizer)."""
    align_grad_reduce: bool = flag(True, names=("--no-align-grad-reduce",))
    """Let each stage start its gradient reduction by itself."""
    align_param_gather: bool = flag(True, names=("--no-align-param-gather",))
    """Let each stage start its parameter gathering by itself."""
    ddp_bucket_size: int | None = None
    """Elements of a gradient bucket; megatron-core decides if not given."""
    ddp_num_buckets: int | None = None
    """Number of gradient buckets, instead of their size."""
    ddp_average_in_collective: bool = False
    """Average gradients in the collective instead of before it."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer's state over the data-parallel ranks."""
    distributed_backend: str | None = flag(None, choices=("trainmover", "nccl", "gloo"))
    """Library that carries collectives; if not given, trainmover without CUDA and nccl with it."""
    distributed_timeout_minutes: float = 10.0
    """Longest wait of one collective, in minutes."""
    local_rank: int | None = flag(None, names=("--local-rank", "--local_rank"))
    """Rank on this machine as older launchers pass it; the environment's LOCAL_RANK wins."""
