"""What a plan must satisfy before anything starts. Pure, no torch; the checks of files are in `preflight.py`.

`check_plan` raises SettingsError with the first thing that cannot work; `warnings_of` tells what is taken another
way than it was asked for. Rules that hold on CPU only come from what was measured with megatron-core there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.training.config import SettingsError
from megatron.training.layout import Plan

_RECOMPUTE_MODULES = ("core_attn", "layernorm", "moe", "moe_act", "mlp", "shared_experts")


def check_plan(plan: Plan) -> None:
    """Raises SettingsError, in one line, when `plan` cannot be trained as asked."""
    for check in _CHECKS:
        for complaint in check(plan):
            raise SettingsError(complaint)


def warnings_of(plan: Plan) -> tuple[str, ...]:
    """Lines about wishes that are answered in another way."""
    return tuple(_wishes(plan))


def _model(plan: Plan) -> Iterator[str]:
    model, tp = plan.settings.model, plan.settings.parallel.tensor_model_parallel_size
    seq_length, longest = plan.settings.data.seq_length or 0, model.max_position_embeddings or 0
    if seq_length > longest:
        yield f"--seq-length {seq_length} is longer than --max-position-embeddings {longest}; raise the latter"
    for name, value in (
        ("--num-attention-heads", model.num_attention_heads or 0),
        ("--ffn-hidden-size", model.ffn_hidden_size or 0),
    ):
        if value % tp or value < 1:
            yield f"{name} {value} is not a multiple of --tensor-model-parallel-size {tp}; change one"
    if model.num_query_groups % tp and tp % model.num_query_groups:
        yield (
            f"--num-query-groups {model.num_query_groups} is neither a multiple nor a divisor of "
            f"--tensor-model-parallel-size {tp}; change one"
        )
    cp = plan.settings.parallel.context_parallel_size
    if cp > 1 and seq_length % (2 * cp):
        yield f"--seq-length {seq_length} is not a multiple of {2 * cp} = 2 x --context-parallel-size; change one"
    if plan.settings.parallel.sequence_parallel and seq_length % (cp * tp):
        yield f"--seq-length {seq_length} is not a multiple of {cp * tp} ranks that share it by --sequence-parallel"
    if (model.num_attention_heads or 0) % model.num_query_groups:
        yield (
            f"--num-attention-heads {model.num_attention_heads} is not a multiple of --num-query-groups "
            f"{model.num_query_groups}; change one"
        )
    if model.squared_relu and model.swiglu:
        yield "found --squared-relu and --swiglu, expected one of them; leave one out"
    if not 0 <= model.hidden_dropout < 1 or not 0 <= model.attention_dropout < 1:
        yield "--hidden-dropout and --attention-dropout must be below 1"
    if model.position_embedding_type == "rope" and not 0 < model.rotary_percent <= 1:
        yield f"--rotary-percent is {model.rotary_percent}, expected above 0 and at most 1"


def _pipeline(plan: Plan) -> Iterator[str]:
    parallel, layers = plan.settings.parallel, plan.settings.model.num_layers or 0
    stages, virtual = parallel.pipeline_model_parallel_size, plan.virtual_pipeline_size or 1
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if first is None and last is None:
        if layers % (stages * virtual):
            cut = f"{stages} stages" + (f" x {virtual} virtual stages" if virtual > 1 else "")
            yield (
                f"--num-layers {layers} does not divide into {cut}; change one, or name the ends' layers with "
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
            )
        return
    if stages < 2:
        yield "an uneven pipeline needs --pipeline-model-parallel-size 2 or more"
    middle_stages = stages - (first is not None) - (last is not None)
    middle_layers = layers - (first or 0) - (last or 0)
    if (middle_stages and (middle_layers < middle_stages or middle_layers % middle_stages)) or (
        not middle_stages and middle_layers
    ):
        yield (
            f"--num-layers {layers} less the named ends leaves {middle_layers} layers for {middle_stages} stages; "
            "they must divide"
        )
        return
    middle = middle_layers // middle_stages if middle_stages else virtual
    if any((part or virtual) % virtual for part in (first, last, middle)):
        yield f"layers of the first, the last and the middle stages must be multiples of the {virtual} virtual stages"


def _interleaving(plan: Plan) -> Iterator[str]:
    """megatron-core's interleaved schedule takes groups of at least one microbatch a stage, the last one too."""
    if plan.virtual_pipeline_size is None:
        return
    parallel, run = plan.settings.parallel, plan.settings.run
    stages = parallel.pipeline_model_parallel_size
    group = parallel.microbatch_group_size_per_vp_stage or stages
    start, increment, _ = run.rampup_batch_size or (plan.global_batch_size, 1, 0)
    for batch_size in range(start, plan.global_batch_size + 1, increment):
        microbatches = batch_size // ((run.micro_batch_size or 1) * plan.data_parallel_size)
        if not stages <= group <= microbatches or 0 < microbatches % group < stages:
            yield (
                f"the interleaved schedule found {microbatches} microbatches in groups of {group}, expected a multiple "
                f"of {stages} stages; change --global-batch-size, or give "
                "--microbatch-group-size-per-virtual-pipeline-stage a size from the number of stages up"
            )


def _schedule(plan: Plan) -> Iterator[str]:
    parallel, run = plan.settings.parallel, plan.settings.run
    if parallel.overlap_param_gather and not parallel.use_distributed_optimizer:
        yield "--overlap-param-gather needs --use-distributed-optimizer"
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce"
    if run.recompute_granularity == "full" and (run.recompute_method is None or run.recompute_num_layers is None):
        yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers"
    if run.recompute_granularity == "selective" and run.recompute_num_layers is not None:
        yield "--recompute-num-layers needs --recompute-granularity full"
    if "moe_act" in (run.recompute_modules or ()) and not plan.settings.moe.moe_grouped_gemm:
        yield "recomputing moe_act needs --moe-grouped-gemm"
    if run.recompute_granularity != "selective" and run.recompute_modules:
        yield "--recompute-modules needs --recompute-granularity selective"
    for name in run.recompute_modules or ():
        if name not in _RECOMPUTE_MODULES:
            yield f"--recompute-modules {name}: expected some of {' '.join(_RECOMPUTE_MODULES)}"
    if "mlp" in (run.recompute_modules or ()) and plan.settings.model.add_bias_linear:
        yield "recomputing mlp never ends when linear layers have biases; add --disable-bias-linear or leave mlp out"
    if run.fp16 and run.bf16:
        yield "found --fp16 and --bf16, expected one of them"
    if plan.settings.model.apply_query_key_layer_scaling and not run.fp16:
        yield "--apply-query-key-layer-scaling needs --fp16"
    if plan.settings.model.fp16_lm_cross_entropy and not run.fp16:
        yield "--fp16-lm-cross-entropy needs --fp16"


def _optimizer(plan: Plan) -> Iterator[str]:
    optimizer = plan.settings.optimizer
    by_samples = plan.settings.run.train_samples is not None
    unit = "samples" if by_samples else "iters"
    last_part, decay = getattr(optimizer, f"lr_wsd_decay_{unit}"), getattr(optimizer, f"lr_decay_{unit}")
    if optimizer.lr_decay_style == "WSD" and not (last_part and last_part <= decay):
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit} of at most the decay's {decay}"
    start, end = optimizer.start_weight_decay or 0.0, optimizer.end_weight_decay or 0.0
    if end < start or (start != end and optimizer.weight_decay_incr_style == "constant"):
        yield (
            f"the weight decay goes from {start} to {end}; give --weight-decay-incr-style linear or cosine, and an end "
            "that is not below the start"
        )
    if optimizer.optimizer == "sgd" and plan.settings.parallel.use_distributed_optimizer:
        yield "--optimizer sgd does not go with --use-distributed-optimizer; leave one out"
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        yield "found --override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler, expected one of them"
    if max(optimizer.adam_beta1, optimizer.adam_beta2) >= 1:
        yield "--adam-beta1 and --adam-beta2 must be below 1"


def _experts(plan: Plan) -> Iterator[str]:
    moe, parallel = plan.settings.moe, plan.settings.parallel
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    if moe.num_experts is None:
        if ep > 1:
            yield f"--expert-model-parallel-size {ep} needs --num-experts"
        return
    if moe.num_experts % ep:
        yield f"--num-experts {moe.num_experts} is not a multiple of --expert-model-parallel-size {ep}; change one"
    etp = parallel.expert_tensor_parallel_size or tp
    per_stage = plan.world_size // parallel.pipeline_model_parallel_size
    if per_stage % (ep * etp):
        yield (
            f"{per_stage} ranks a stage are not a multiple of expert size {ep} x expert tensor size {etp}; "
            "change --expert-model-parallel-size"
        )
    if moe.moe_router_topk > moe.num_experts:
        yield f"--moe-router-topk {moe.moe_router_topk} is more than --num-experts {moe.num_experts}"
    if tp > 1 and not parallel.sequence_parallel:
        yield "experts with tensor parallelism need --sequence-parallel"
    yield from _experts_of_core(plan, etp)


def _experts_of_core(plan: Plan, etp: int) -> Iterator[str]:
    """What megatron-core's layers ask of experts."""
    moe, model = plan.settings.moe, plan.settings.model
    for name, width, size in (
        ("--moe-ffn-hidden-size", moe.moe_ffn_hidden_size or model.ffn_hidden_size or 0, etp),
        (
            "--moe-shared-expert-intermediate-size",
            moe.moe_shared_expert_intermediate_size or 0,
            plan.settings.parallel.tensor_model_parallel_size,
        ),
    ):
        if width % size:
            yield f"{name} {width} is not a multiple of {size}, its tensor-parallel size; change one"
    if model.add_bias_linear and etp > 1:
        yield "tensor-parallel experts cannot have biases; add --disable-bias-linear or --expert-tensor-parallel-size 1"
    softmax_first = moe.moe_router_score_function != "softmax" or moe.moe_router_pre_softmax
    if moe.moe_router_topk == 1 and not softmax_first and moe.moe_router_load_balancing_type != "sinkhorn":
        yield "--moe-router-topk 1 needs --moe-router-pre-softmax"
    is_limited = moe.moe_expert_capacity_factor is not None and moe.moe_expert_capacity_factor >= 0
    if moe.moe_expert_capacity_factor is not None and moe.moe_router_load_balancing_type == "sinkhorn":
        yield "--moe-expert-capacity-factor does not go with --moe-router-load-balancing-type sinkhorn"
    if moe.moe_pad_expert_input_to_capacity and not is_limited:
        yield "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor"


def _cuda(plan: Plan) -> Iterator[str]:
    parallel = plan.settings.parallel
    two_stages = plan.virtual_pipeline_size and parallel.pipeline_model_parallel_size == 2
    if plan.on_cuda and two_stages and not parallel.overlap_p2p_comm:
        # NCCL has no tags, by which the others tell the two directions apart.
        yield "on CUDA, --no-overlap-p2p-communication with virtual stages needs 3 pipeline stages or more"


def _backend(plan: Plan) -> Iterator[str]:
    if plan.on_cuda and plan.backend == "trainmover":
        yield "--distributed-backend trainmover communicates CPU tensors only in this version; leave it out to use nccl"


def _cpu(plan: Plan) -> Iterator[str]:
    if plan.on_cuda:
        return
    parallel, moe = plan.settings.parallel, plan.settings.moe
    if parallel.context_parallel_size > 1:
        yield f"--context-parallel-size {parallel.context_parallel_size} needs CUDA; without it only 1 works"
    if moe.moe_grouped_gemm:
        yield "--moe-grouped-gemm needs CUDA; leave it out to compute experts one by one"
    if moe.moe_token_dispatcher_type == "flex":
        yield "--moe-token-dispatcher-type flex needs CUDA; use allgather or alltoall"
    if (
        plan.backend == "gloo"
        and moe.num_experts
        and (parallel.expert_tensor_parallel_size or 1) > 1
        and moe.moe_token_dispatcher_type == "alltoall"
    ):
        yield (
            "alltoall with tensor-parallel experts needs an uneven all-gather, which gloo lacks; leave "
            "--distributed-backend gloo out"
        )
    if plan.settings.run.cross_entropy_loss_fusion:
        yield "--cross-entropy-loss-fusion needs CUDA; leave it out"


def _data(plan: Plan) -> Iterator[str]:
    data = plan.settings.data
    apart = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if data.data_path and any(apart):
        yield "found --data-path and --train/valid/test-data-path, expected one kind"
    if not data.data_path and not any(apart) and not data.mock_data:
        yield "no data: give --data-path PREFIX (scripts/prepare_data.py makes one), or --mock-data"
    if data.mock_data and (data.data_path or any(apart)):
        yield "found --mock-data and paths of real data, expected one of them"
    if any(apart) and not data.train_data_path and not plan.settings.run.skip_train:
        yield "found data for validation or test alone; give --train-data-path too"
    if data.tokenizer_type == "GPT2BPETokenizer" and not (data.vocab_file and data.merge_file):
        yield (
            "--tokenizer-type GPT2BPETokenizer, the one taken if none is given, needs --vocab-file and --merge-file; "
            "give them, or another --tokenizer-type"
        )


_CHECKS: tuple[Callable[[Plan], Iterator[str]], ...] = (
    *(_model, _pipeline, _interleaving, _schedule, _optimizer, _experts, _backend, _cuda, _cpu, _data),
)


def _wishes(plan: Plan) -> Iterator[str]:
    if plan.on_cuda:
        return
    if plan.settings.parallel.distributed_backend == "nccl":
        yield "--distributed-backend nccl needs CUDA: trainmover is used"
    if not plan.settings.data.create_attention_mask_in_dataloader:
        yield "--no-create-attention-mask-in-dataloader: without transformer-engine the mask is made a rank, same maths"
    if plan.settings.model.use_flash_attn or plan.settings.model.attention_backend in ("flash", "fused"):
        yield "flash attention needs CUDA: megatron-core's own attention is used, same maths"
