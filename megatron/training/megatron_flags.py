"""The Megatron-LM flags that this trainer knows of and does not implement, and what it does when it meets one.

A flag is IGNORED, with a warning, when the trained model is the same without it: it changes speed, memory or what is
reported, or `pretrain_gpt.py` never reads it. It is REFUSED when a run without it would train something else, write
other checkpoints, or leave out something that was asked for. The settings of a refused feature are refused with it.

The two texts below hold the table: a line that is not indented is a reason, and the indented lines after it name the
flags it is the reason for. `--a` takes no value, `--a=` takes one, `--a=?` none or one, `--a=*` any number.

The names are those of `megatron/training/arguments.py` around core 0.16, of the flags which that release derives from
its config dataclasses, of ModelOpt's additions to `pretrain_gpt.py`, and of some flags of earlier and later releases.
"""

import enum
from dataclasses import dataclass


class Takes(enum.Enum):
    """How many values follow a flag on the command line."""

    NONE = "none"
    ONE = "one"
    OPTIONAL_ONE = "none or one"
    MANY = "any number"


class Verdict(enum.Enum):
    """What becomes of a flag that is not implemented."""

    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True)
class MegatronFlag:
    """One flag of Megatron-LM that is not implemented; `reason` follows "ignored: " or "refused: "."""

    takes: Takes
    verdict: Verdict
    reason: str


_IGNORED = """
a fused kernel or a choice of kernel; the same maths
    --use-fused-weighted-squared-relu --use-te-activation-func --no-gradient-reduce-div-fusion --moe-router-fusion
    --moe-permute-fusion --moe-use-legacy-grouped-gemm --disable-jit-fuser --cross-entropy-fusion-impl= --onnx-safe=?
overlaps tensor-parallel communication with matmuls; speed only
    --tp-comm-overlap --tp-comm-overlap-rs-dgrad --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs
    --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad --disable-tp-comm-split-ag --disable-tp-comm-split-rs
    --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad
    --no-tp-comm-split-ag --no-tp-comm-split-rs --disable-async-tensor-model-parallel-allreduce --tp-comm-overlap-cfg=
    --tp-comm-bootstrap-backend=
when gradients and parameters are communicated; speed only
    --overlap-param-gather-with-optimizer-step --ddp-pad-buckets-for-high-nccl-busbw --disable-align-grad-reduce
    --no-delay-grad-reduce --delay-param-gather --create-all-gather-group --defer-embedding-wgrad-compute
    --delay-wgrad-compute --wgrad-deferral-limit=
how pipeline stages send to each other; speed only
    --overlap-p2p-communication-warmup-flush --no-scatter-gather-tensors-in-pipeline --use-ring-exchange-p2p
    --pipeline-model-parallel-comm-backend=
how expert-parallel ranks exchange tokens; speed only
    --moe-shared-expert-overlap --moe-enable-deepep --overlap-moe-expert-parallel-comm
    --ep-overlap-early-attn-memory-release --moe-deepep-num-sms= --moe-hybridep-num-sms=
    --moe-flex-dispatcher-backend=
tuning of NCCL and of its process groups
    --use-nccl-ub --disable-symmetric-registration --use-sharp --disable-gloo-process-groups --sharp-enabled-group=
    --nccl-communicator-config-path= --distributed-timeout-seconds-after-init= --symmetric-ar-type=
    --high-priority-stream-groups=*
CUDA graphs; speed only
    --enable-cuda-graph --external-cuda-graph --te-rng-tracker --cuda-graph-impl= --cuda-graph-warmup-steps=
    --cuda-graph-scope=*
memory or scheduling only; the same maths
    --distribute-saved-activations --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding
    --no-manual-gc-eval --disable-manual-gc-eval --empty-unused-memory-level= --train-sync-interval=
memory only; --recompute-modules moe does the same
    --moe-layer-recompute
goes to Weights & Biases
    --wandb-project= --wandb-entity= --wandb-exp-name= --wandb-save-dir=
goes to NVIDIA's one-logger
    --no-one-logger --enable-one-logger --one-logger-async --one-logger-project= --one-logger-entity=
    --one-logger-run-name= --app-tag-run-name= --app-tag-run-version=
a detail of the log or of TensorBoard
    --log-progress --log-energy --log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard
    --disable-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard
    --log-batch-size-to-tensorboard --no-log-learnig-rate-to-tensorboard --log-throughput-to-tensorboard
    --log-l2-norm-grad-to-tensorboard --log-runtime-to-tensorboard --log-max-attention-logit --moe-per-layer-logging
    --logging-level= --config-logger-dir= --throughput-window-size= --runtime-time-unit= --save-config-filepath=
timers beyond the iteration time
    --no-barrier-with-level-1-timing --timing-log-level= --timing-log-option=
a memory report
    --log-memory-to-tensorboard --log-device-memory-used --record-memory-history --log-memory-interval=
    --memory-snapshot-path=
a profiler
    --profile --use-pytorch-profiler --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack
    --pytorch-profiler-collect-chakra --record-shapes --nvtx-ranges --run-workload-inspector-server
    --profile-step-start= --profile-step-end= --profile-ranks=*
straggler detection
    --log-straggler --disable-straggler-on-startup --straggler-ctrlr-port= --straggler-minmax-count=
    --gpu-sniff-test-interval=
a check on results that does not change them
    --check-for-spiky-loss --check-for-large-grads --test-mode --rerun-mode=
    --check-weight-hash-across-dp-replicas-interval=
a dump for debugging
    --moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights
    --flight-recorder-include-stack-trace --no-flight-recorder-dump-on-timeout
    --disable-flight-recorder-dump-on-timeout --no-flight-recorder-include-only-active
    --disable-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec
    --disable-flight-recorder-extra-dump-on-exec --dump-param-to-param-group-map= --save-wgrads-interval=
    --save-dgrads-interval= --save-params-interval= --save-activations-interval= --save-tokens-per-expert-interval=
    --moe-routing-trace-path= --moe-routing-trace-max-training-iters= --flight-recorder-dump-path=
    --flight-recorder-trace-buffer-size=
NVIDIA's own hang detection
    --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters=
no effect in Megatron-LM either
    --ckpt-fully-parallel-save --dist-ckpt-format=
picks Megatron-LM's older tokenizer code, which its later releases dropped
    --legacy-tokenizer
only permits features that are refused by their own flags
    --enable-experimental
no multi-storage client is used
    --disable-msc
no remote code is run for a tokenizer
    --trust-remote-code
fast tokenizers are the only ones used
    --tokenizer-hf-use-fast
read only by TikTokenizer
    --tiktoken-pattern= --tiktoken-num-special-tokens= --tiktoken-special-tokens=*
inference only
    --flash-decode --use-legacy-static-engine --inference-dynamic-batching
    --inference-dynamic-batching-track-paused-request-events --inference-dynamic-batching-track-generated-token-events
    --decode-only-cuda-graphs --nccl-all-reduce-for-prefill --disable-chunked-prefill --enable-chunked-prefill
    --inference-wandb-logging --no-inference-wandb-logging --inference-rng-tracker --inference-fuse-tp-communication
    --moe-pad-experts-for-cuda-graph-inference --cache-mla-latents --inference-batch-times-seqlen-threshold=
    --max-tokens-to-oom= --inference-max-requests= --inference-max-seq-length= --inference-max-batch-size=
    --inference-dynamic-batching-buffer-size-gb= --inference-dynamic-batching-paused-buffer-size-gb=
    --inference-dynamic-batching-mamba-memory-ratio= --inference-dynamic-batching-block-size=
    --inference-dynamic-batching-buffer-guaranteed-fraction= --inference-dynamic-batching-buffer-overflow-factor=
    --inference-dynamic-batching-max-requests-override= --inference-dynamic-batching-max-tokens-override=
    --inference-dynamic-batching-max-requests= --inference-dynamic-batching-max-tokens=
    --inference-dynamic-batching-num-cuda-graphs= --inference-dynamic-batching-unified-memory-level=
    --inference-dynamic-batching-cuda-graph-max-tokens= --inference-dynamic-batching-cuda-graph-mixed-prefill-count=
    --mlp-chunks-for-prefill= --inference-wandb-logging-step-interval= --inference-logging-step-interval=
    --inference-coordinator-port=
retrieval model (BERT/REALM) only
    --biencoder-shared-query-context-model --use-one-sent-docs --retriever-score-scaling --ict-head-size=
    --biencoder-projection-dim= --titles-data-path= --query-in-block-prob= --evidence-data-path= --block-data-path=
    --embedding-path= --indexer-batch-size= --indexer-log-interval= --retriever-seq-length=
    --retriever-report-topk-accuracies=*
BERT and T5 only
    --bert-no-binary-head --mask-prob= --short-seq-prob= --bert-embedder-type= --relative-attention-num-buckets=
    --relative-attention-max-distance=
vision models only
    --dino-norm-last-layer --num-classes= --img-h= --img-w= --num-channels= --patch-dim= --classes-fraction=
    --data-per-class-fraction= --head-lr-mult= --vision-pretraining-type= --vision-backbone-type=
    --swin-backbone-type= --mask-type= --mask-factor= --iter-per-epoch= --dino-local-img-size=
    --dino-local-crops-number= --dino-head-hidden-size= --dino-bottleneck-size= --dino-freeze-last-layer=
    --dino-warmup-teacher-temp= --dino-teacher-temp= --dino-warmup-teacher-temp-epochs=
no handler runs in the data workers
    --exit-signal-handler-for-dataloader
how a checkpoint is written or read; its contents are the same
    --use-persistent-ckpt-worker --distrib-optim-fully-reshardable-mem-efficient --async-ckpt-use-cpu-shm
    --ckpt-fully-parallel-save-replicate-local --ckpt-fully-parallel-load-replicate-local
    --no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity --async-strategy=
    --async-ckpt-cpu-priority= --async-ckpt-io-priority= --ckpt-fully-parallel-load-exchange-algo=
    --ckpt-fully-parallel-save-process-group= --ckpt-fully-parallel-load-process-group=
the format is the one --ckpt-format names
    --auto-detect-ckpt-format
how dataset indexes are built and opened; speed only
    --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --per-dataset-sequences-path=
"""

_REFUSED = """
multi-latent attention is not implemented
    --multi-latent-attention --q-lora-rank= --kv-lora-rank= --qk-head-dim= --qk-pos-emb-head-dim= --v-head-dim=
    --rotary-scaling-factor= --mscale= --mscale-all-dim=
Mamba and hybrid models are not implemented
    --is-hybrid-model --disable-mamba-mem-eff-path --hybrid-attention-ratio= --hybrid-mlp-ratio=
    --hybrid-override-pattern= --hybrid-layer-pattern= --mamba-state-dim= --mamba-head-dim= --mamba-num-groups=
    --mamba-num-heads=
multi-token prediction is not implemented
    --mtp-standalone --mtp-num-layers= --mtp-loss-scaling-factor=
another attention than the softmax one
    --attention-output-gate --dsa-indexer-use-sparse-loss --qk-l2-norm --qk-clip --softmax-type= --window-size=
    --window-attn-skip-freq= --qk-clip-alpha= --qk-clip-threshold= --experimental-attention-variant=
    --dsa-indexer-n-heads= --dsa-indexer-head-dim= --dsa-indexer-topk= --dsa-indexer-loss-coeff=
    --linear-attention-freq= --linear-conv-kernel-dim= --linear-key-head-dim= --linear-value-head-dim=
    --linear-num-key-heads= --linear-num-value-heads=
a variant of rotary embeddings that is not implemented
    --use-rope-scaling --rope-scaling-factor= --rope-type= --no-rope-freq= --rotary-seq-len-interpolation-factor=
    --mrope-section=*
an activation function that is not implemented
    --openai-gelu --quick-geglu --activation-func-clamp-value= --glu-linear-offset=
zero-centred norm weights are not implemented
    --apply-layernorm-1p
another order of norm and residual
    --apply-residual-connection-post-layernorm
residuals in fp32 are not implemented
    --fp32-residual-connection
another initialisation of the embeddings
    --embedding-init-method-std=
layers that differ from each other are not implemented
    --heterogeneous-layers-config-path= --heterogeneous-layers-config-encoded-json=
only the built-in layer specs are used
    --spec=*
the models from before megatron-core are not offered
    --use-legacy-models
encoder-decoder models are not implemented; --num-layers and --seq-length size a GPT model
    --standalone-embedding-stage --encoder-num-layers= --decoder-num-layers= --encoder-seq-length=
    --decoder-seq-length= --pipeline-model-parallel-split-rank= --encoder-tensor-model-parallel-size=
    --encoder-pipeline-model-parallel-size=
a way of routing to experts that is not implemented
    --moe-router-enable-expert-bias --moe-router-force-load-balancing --moe-enable-routing-replay
    --moe-apply-probs-on-input --moe-shared-expert-gate --moe-token-dropping --moe-router-num-groups=
    --moe-router-group-topk= --moe-router-topk-scaling-factor= --moe-router-bias-update-rate=
    --moe-router-topk-limited-devices= --moe-input-jitter-eps= --moe-latent-size=
turning a dense checkpoint into experts is not implemented
    --moe-use-upcycling --moe-upcycling-granularity=
retrieval-enhanced models (Retro) are not implemented
    --retro-add-retriever --retro-no-verify-neighbor-count --retro-project-dir= --retro-cyclic-train-iters=
    --retro-encoder-layers= --retro-encoder-hidden-dropout= --retro-encoder-attention-dropout= --retro-num-neighbors=
    --retro-num-retrieved-chunks= --retro-attention-gate=
only GPT models are trained
    --vision-pretraining --output-bert-embeddings --ict-load= --bert-load=
fp8 is not implemented
    --fp8-param-gather --no-fp8-wgrad --disable-fp8-wgrad --first-last-layers-bf16 --fp8-e4m3 --fp8-hybrid
    --keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag --moe-router-padding-for-fp8
    --moe-router-padding-for-quantization --fp8-format= --fp8-recipe= --fp8-quantizer-factory= --fp8-margin=
    --fp8-interval= --fp8-amax-history-len= --fp8-amax-compute-algo= --num-layers-at-start-in-bf16=
    --num-layers-at-end-in-bf16=
fp4 is not implemented
    --fp4-param-gather --fp4-format= --fp4-recipe= --fp4-quantizer-factory=
quantised training is not implemented
    --use-kitchen-attention --kitchen-config-file= --kitchen-recipe-number= --kitchen-attention-backend=
    --te-precision-config-file=
gradients are reduced in the precision they are accumulated in
    --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation
rounds matmuls differently
    --disable-bf16-reduced-precision-matmul --batch-invariant-mode
optimizer states stay in fp32
    --use-precision-aware-optimizer --main-grads-dtype= --main-params-dtype= --exp-avg-dtype= --exp-avg-sq-dtype=
the optimizers are adam and sgd
    --muon-no-split-qkv --muon-use-nesterov --muon-momentum= --muon-scale-mode= --muon-fp32-matmul-prec=
    --muon-num-ns-steps= --muon-tp-mode= --muon-extra-scale-factor=
one learning rate holds for all layers
    --decoupled-lr= --decoupled-min-lr=
weight decay exempts norms and biases
    --apply-wd-to-qk-layernorm --no-weight-decay-cond-type=
the loss is averaged per micro-batch
    --calculate-per-token-loss
skipping iterations is not implemented
    --result-rejected-tracker-filename= --iterations-to-skip=*
faults are not injected into results
    --error-injection-rate= --error-injection-type=
the batch size only ramps up linearly
    --step-batch-size-schedule= --phase-transition-iterations=
withdrawn by Megatron-LM; use --micro-batch-size
    --batch-size=
withdrawn by Megatron-LM; use --lr-warmup-iters
    --warmup=
withdrawn by Megatron-LM; use --tensor-model-parallel-size
    --model-parallel-size=
withdrawn by Megatron-LM; use --recompute-activations
    --checkpoint-activations
withdrawn by Megatron-LM; use --expert-tensor-parallel-size
    --moe-extended-tp
SIGTERM and SIGUSR1 are the signals handled
    --exit-signal-handler-for-training --exit-signal=
needs the scheduler of NVIDIA's ADLR cluster
    --adlr-autoresume --adlr-autoresume-interval=
evaluation runs --eval-iters batches of the training size
    --full-validation --multiple-validation-sets --eval-global-batch-size= --eval-micro-batch-size=
    --start-eval-at-iter= --validation-set-names=*
offloading from the GPU is not implemented
    --optimizer-cpu-offload --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads
    --no-pin-cpu-params --fine-grained-activation-offloading --optimizer-offload-fraction=
    --cpu-offloading-num-layers= --min-offloaded-tensor-size= --offload-modules=*
in-process restart is not implemented
    --inprocess-restart --inprocess-empty-cuda-cache --inprocess-max-iterations= --inprocess-monitor-thread-interval=
    --inprocess-monitor-process-interval= --inprocess-progress-watchdog-interval= --inprocess-heartbeat-interval=
    --inprocess-soft-timeout= --inprocess-hard-timeout= --inprocess-heartbeat-timeout= --inprocess-barrier-timeout=
    --inprocess-completion-timeout= --inprocess-last-call-wait= --inprocess-termination-grace-time=
    --inprocess-granularity= --inprocess-active-world-size=
reinforcement learning is not implemented
    --perform-rl-step --grpo-filter-groups-with-same-reward --langrl-external-server --no-langrl-external-server
    --rl-offload-optimizer-during-inference --rl-offload-kv-cache-during-training
    --no-rl-offload-kv-cache-during-training --rl-remove-kv-cache-during-training
    --no-rl-remove-kv-cache-during-training --rl-reset-cuda-graphs --no-rl-reset-cuda-graphs --rl-partial-rollouts
    --no-rl-partial-rollouts --rl-inference-logprobs-is-correction --no-rl-inference-logprobs-is-correction
    --rl-calculate-intra-group-similarity --no-rl-calculate-intra-group-similarity --rl-use-sequence-packing
    --no-rl-use-sequence-packing --rl-training-cuda-graphs --no-rl-training-cuda-graphs
    --rl-offload-inference-model-weights-when-idle --no-rl-offload-inference-model-weights-when-idle
    --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap --rl-skip-bos-token --no-rl-skip-bos-token
    --rl-prompts-per-eval= --grpo-prompts-per-step= --grpo-group-size= --grpo-iterations= --grpo-clamp-eps-lower=
    --grpo-clamp-eps-upper= --grpo-kl-beta= --grpo-entropy-term-weight= --grpo-default-temperature=
    --grpo-default-top-p= --langrl-inference-server-type= --langrl-inference-server-conversation-template=
    --langrl-env-config= --rl-default-temperature= --rl-default-top-p= --rl-default-top-k=
    --rl-importance-sampling-truncation-coef= --rl-sequence-packing-bin-size=
    --rl-sequence-packing-max-sequences-per-bin= --rl-sequence-packing-algo=
    --rl-inference-tensor-model-parallel-size= --rl-inference-pipeline-model-parallel-size=
    --rl-inference-expert-model-parallel-size= --rl-inference-expert-tensor-model-parallel-size=
    --rl-inference-model-unified-memory-level= --rl-parallel-generation-tasks= --refit-method=
ModelOpt (quantisation, pruning, distillation, fine-tuning) is not implemented
    --export-legacy-megatron --export-te-mcore-model --export-force-local-attention --export-qk-l2-norm
    --export-moe-apply-probs-on-input --export-offline-model --modelopt-enabled --enable-gpt-oss --export-model-type=
    --export-kv-cache-quant= --export-real-quant-cfg= --export-quant-cfg= --export-kd-teacher-load=
    --export-kd-teacher-model-config= --export-kd-teacher-ckpt-format= --export-kd-cfg= --finetune-hf-dataset=
    --finetune-data-split=
fully sharded data parallelism is not implemented
    --use-megatron-fsdp --use-custom-fsdp --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward
    --init-model-with-meta-device --fsdp-double-buffer --fsdp-manual-registration --enable-full-sharding-in-hsdp
    --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load --data-parallel-sharding-strategy=
    --outer-dp-sharding-strategy= --suggested-communication-unit-size= --num-distributed-optimizer-instances=
a variant of context parallelism that is not implemented
    --hybrid-context-parallel --max-seqlen-per-dp-cp-rank= --cp-comm-type=* --hierarchical-context-parallel-sizes=*
a placement of layers in the pipeline that is not implemented
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --pipeline-model-parallel-layout=
ranks are ordered tp-cp-ep-dp-pp
    --use-tp-pp-dp-mapping
nothing would be trained
    --fake-process-group
the trainer sets up its own process groups
    --lazy-mpu-init=?
older checkpoints are not deleted
    --save-retain-interval=
non-persistent checkpoints are not implemented
    --replication --non-persistent-save-interval= --non-persistent-ckpt-type= --non-persistent-global-ckpt-dir=
    --non-persistent-local-ckpt-dir= --non-persistent-local-ckpt-algo= --replication-jump= --replication-factor=
checkpoints are not converted
    --ckpt-convert-update-legacy-dist-opt-format --ckpt-convert-format= --ckpt-convert-save=
a checkpoint layout that is not implemented
    --dist-ckpt-save-pre-mcore-014 --dist-ckpt-optim-fully-reshardable --verify-integrity
a way of loading that is not implemented
    --load-main-params-from-ckpt --use-mp-args-from-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args
    --disable-use-tokenizer-model-from-checkpoint-args --dist-ckpt-strictness= --pretrained-checkpoint=
name the datasets with --data-path or its kin
    --data-args-path= --per-split-data-args-path=
data is read from a file system only
    --object-storage-cache-path=
would change which samples are drawn, and their order
    --no-data-sharding --sample-rate= --mid-level-dataset-surplus=
would change which tokens count in the loss
    --allow-ambiguous-pad-tokens
fill-in-the-middle data is not implemented
    --fim-data --fim-rate= --fim-spm-rate= --fim-split-sample= --fim-fragment-rate= --fim-no-prefix=
    --fim-prefix-token= --fim-middle-token= --fim-suffix-token= --fim-pad-token= --fim-eod-token=
supervised fine-tuning is not implemented
    --sft --sft-tokenizer-prompt-format= --chat-template=
the vocabulary is the tokenizer's, padded by --make-vocab-size-divisible-by
    --no-pad-vocab-size --disable-pad-vocab-size --padded-vocab-size= --vocab-extra-ids= --null-tokenizer-eod-id=
    --null-tokenizer-pad-id=
would change how text becomes tokens
    --tokenizer-sentencepiece-legacy --no-tokenizer-sentencepiece-ignore-extra-whitespaces
    --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-include-special-tokens
    --tokenizer-hf-no-include-special-tokens --tokenizer-hf-no-use-fast --tokenizer-metadata=
    --tokenizer-special-tokens=*
"""

_TAKES = {"": Takes.NONE, "=": Takes.ONE, "=?": Takes.OPTIONAL_ONE, "=*": Takes.MANY}


def _table(texts: dict[Verdict, str]) -> dict[str, MegatronFlag]:
    table: dict[str, MegatronFlag] = {}
    for verdict, text in texts.items():
        reason = ""
        for line in text.strip().splitlines():
            if not line.startswith(" "):
                reason = line
                continue
            for entry in line.split():
                flag = entry.rstrip("=?*")
                if flag in table:
                    raise ValueError(f"listed twice: {flag}")
                table[flag] = MegatronFlag(_TAKES[entry.removeprefix(flag)], verdict, reason)
    return table


MEGATRON_FLAGS: dict[str, MegatronFlag] = _table({Verdict.IGNORED: _IGNORED, Verdict.REFUSED: _REFUSED})
