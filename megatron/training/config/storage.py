"""Settings of what a run reads and writes: checkpoints, data, logs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.flag import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Saving and loading of checkpoints."""

    save: str | None = None
    """Folder to save checkpoints in."""
    save_interval: int | None = flag(None, names=("--save-interval", "--persistent-save-interval"))
    """Iterations between checkpoints."""
    no_save_optim: bool = False
    """Leave the optimizer's state out."""
    no_save_rng: bool = False
    """Leave the random generators' states out."""
    load: str | None = None
    """Folder to load the newest whole checkpoint from."""
    ckpt_step: int | None = None
    """Iteration of the checkpoint to load, instead of the newest."""
    no_load_optim: bool = False
    """Do not load the optimizer's state."""
    no_load_rng: bool = False
    """Do not load the random generators' states."""
    finetune: bool = False
    """Load the weights alone and start at iteration 0."""
    exit_on_missing_checkpoint: bool = False
    """Stop when --load names no checkpoint, instead of starting anew."""
    async_save: bool = False
    """Write checkpoints in the background."""
    ckpt_format: str = flag("torch_dist", choices=("torch_dist",))
    """Format of checkpoints."""
    use_dist_ckpt: bool = False
    """Accepted for old command lines; distributed checkpoints are the only ones."""
    ckpt_fully_parallel_save: bool = flag(True, names=("--no-ckpt-fully-parallel-save",))
    """Save replicated weights from their first owner only, instead of sharing the work."""
    ckpt_fully_parallel_load: bool = False
    """Share the reading among data-parallel ranks."""
    ckpt_assume_constant_structure: bool = False
    """Keep the plan of the first save for later ones."""
    use_checkpoint_args: bool = False
    """Take the model's shape from the checkpoint instead of the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The text and its tokenizer."""

    data_path: tuple[str, ...] | None = None
    """Prefixes of indexed datasets, or WEIGHT PREFIX pairs, split by --split."""
    train_data_path: tuple[str, ...] | None = None
    """The same for training alone."""
    valid_data_path: tuple[str, ...] | None = None
    """The same for validation alone."""
    test_data_path: tuple[str, ...] | None = None
    """The same for the test alone."""
    split: str | None = None
    """Shares of training, validation and test, such as 969,30,1."""
    data_cache_path: str | None = None
    """Folder for the indices of the datasets; beside the data if not given."""
    mock_data: bool = False
    """Made-up data, for measuring."""
    seq_length: int | None = None
    """Tokens a sample. Required."""
    tokenizer_type: str | None = flag(None, choices=("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"))
    """Kind of tokenizer; GPT2BPETokenizer if not given, or NullTokenizer for --mock-data without --vocab-file."""
    tokenizer_model: str | None = None
    """Local tokenizer.json, or a folder that holds one, for HuggingFaceTokenizer."""
    vocab_size: int | None = None
    """Vocabulary of NullTokenizer; 1023 if neither it nor the kind of tokenizer is given."""
    vocab_file: str | None = None
    """Vocabulary for GPT2BPETokenizer."""
    merge_file: str | None = None
    """Merges for GPT2BPETokenizer."""
    num_workers: int = 2
    """Processes that load data."""
    dataloader_type: str = flag("single", choices=("single", "cyclic"))
    """One pass in order, or passes in random order."""
    create_attention_mask_in_dataloader: bool = flag(True, names=("--no-create-attention-mask-in-dataloader",))
    """Let the model make the causal mask (needs transformer-engine)."""
    num_dataset_builder_threads: int = 1
    """Threads that build the datasets of a blend."""
    reset_position_ids: bool = False
    """Count positions anew after each end of document."""
    reset_attention_mask: bool = False
    """Attend only within a document."""
    eod_mask_loss: bool = False
    """No loss on ends of documents."""
    mmap_bin_files: bool = flag(True, names=("--no-mmap-bin-files",))
    """Read data files instead of mapping them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSettings:
    """What a run tells, and where."""

    log_interval: int = 100
    """Iterations between log lines."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard's event files."""
    tensorboard_log_interval: int = 1
    """Iterations between TensorBoard points."""
    tensorboard_queue_size: int = 1000
    """Points kept before TensorBoard writes."""
    log_params_norm: bool = False
    """Log the norm of the parameters."""
    log_num_zeros_in_grad: bool = False
    """Log the number of zeros in the gradient."""
    log_throughput: bool = False
    """Log tokens a second."""
    metrics_file: str | None = None
    """JSON-lines file of every iteration's exact loss, gradient norm and rate."""
    log_state_digest: bool = False
    """At the end write each rank's SHA-256 of parameters and optimizer state to --metrics-file."""
    yaml_cfg: str | None = None
    """YAML file of settings; flags on the command line win."""
    preflight_only: bool = False
    """Check settings, data, folders and checkpoint without starting; exit code 2 and one line if wrong."""
