"""Data sets, loaders and batches: megatron-core's indexed GPT data, read by each rank that needs it.

Every rank of the first and of the last pipeline stage reads its own samples; nothing is broadcast, so a rank's data
is a function of the files, the seed and the samples consumed. Called by `pretrain()` and `pretrain_gpt.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron.training.config import SettingsError
from megatron.training.data_files import parse_blend
from megatron.training.layout import Plan
from megatron.training.samplers import CyclicSampler, SamplerShape, SequentialSampler
from megatron.training.tokenizer import tokenizer_for
from megatron.training.transformer_config import uses_transformer_engine


class DataEndedError(RuntimeError):
    """A loader was asked for more than its data set holds."""


class DatasetsProvider(Protocol):
    """Builds the training, validation and test sets; `pretrain_gpt.py` has one."""

    def __call__(self, plan: Plan, sizes: tuple[int, int, int]) -> tuple[Any, Any, Any]:
        """Three map-style data sets (or None) of at least `sizes` samples. Collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch on this rank's device; every tensor but the mask is [micro batch, sequence].

    `attention_mask` is bool, True where attention is forbidden, [batch or 1, 1, sequence, sequence], or None where
    the attention makes its own. The others are None on stages that do not read data.
    """

    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    loss_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None


def dataset_sizes(plan: Plan) -> tuple[int, int, int]:
    """Samples that training, validation and test may ask for."""
    run = plan.settings.run
    evaluations = plan.train_iters // run.eval_interval + 1 if run.eval_interval else 1
    one = run.eval_iters * plan.global_batch_size
    return plan.train_samples, evaluations * one, one


def build_gpt_datasets(plan: Plan, sizes: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """megatron-core's GPT data sets for `plan`. Collective: global rank 0 builds the indices, the others wait."""
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if plan.settings.data.mock_data else GPTDataset,
        list(sizes),
        lambda: reads_data(plan),
        _dataset_config(plan),
    )
    train, valid, test = builder.build()
    return train, valid, test


def reads_data(plan: Plan) -> bool:
    """Whether this rank reads samples: first and last stage, or all when the mask depends on the text."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return bool(first or last or plan.settings.data.reset_attention_mask)


def _dataset_config(plan: Plan) -> Any:
    data = plan.settings.data
    per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
    blends: dict[str, Any] = {}
    if any(per_split):
        blends = {"blend_per_split": [_blend(paths) for paths in per_split]}
    elif not data.mock_data:
        blends = {"blend": _blend(data.data_path), "split": data.split}
    else:
        blends = {"split": data.split}
    return GPTDatasetConfig(
        random_seed=plan.settings.run.seed,
        sequence_length=data.seq_length,
        num_dataset_builder_threads=data.num_dataset_builder_threads,
        path_to_cache=data.data_cache_path,
        mmap_bin_files=data.mmap_bin_files,
        tokenizer=tokenizer_for(data),
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=data.reset_attention_mask,
        **blends,
    )


def _blend(paths: tuple[str, ...] | None) -> tuple[list[str], list[float] | None] | None:
    if not paths:
        return None
    pairs = parse_blend(paths)
    weights = [weight for weight, _ in pairs if weight is not None]
    return [prefix for _, prefix in pairs], weights or None


def check_enough_samples(plan: Plan, train: Any) -> None:
    """Raises SettingsError, on all ranks, when the training set ends before the run does. Collective.

    megatron-core makes as many passes as asked for, but only one of a blend without weights.
    """
    if plan.settings.run.skip_train or plan.settings.data.dataloader_type == "cyclic":
        return
    fewest = torch.tensor([plan.train_samples if train is None else len(train)], device=torch.cuda.current_device())
    torch.distributed.all_reduce(fewest, op=torch.distributed.ReduceOp.MIN)
    if int(fewest) < plan.train_samples:
        raise SettingsError(
            f"the training data has {int(fewest)} samples, the run wants {plan.train_samples}; give each prefix of "
            "--data-path a weight to read it more than once, or train for less"
        )


def build_loader(
    plan: Plan, dataset: Any, *, consumed_samples: int, wraps: bool = False
) -> Iterator[dict[str, Any]] | None:
    """Iterator of collated micro-batches, endless if it `wraps`; None where `dataset` is None."""
    if dataset is None:
        return None
    shape = SamplerShape(
        total_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=plan.settings.run.micro_batch_size or 1,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=plan.data_parallel_size,
    )
    cyclic = plan.settings.data.dataloader_type == "cyclic"
    sampler = CyclicSampler(shape, plan.settings.run.seed) if cyclic else SequentialSampler(shape, wraps=wraps)
    workers = plan.settings.data.num_workers
    return iter(
        torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=plan.on_cuda,
            # Its own generator: the default one is dropout's on the CPU, and drawing from it would change the bits.
            generator=torch.Generator(),
        )
    )


class BatchSource:
    """Turns a loader's samples into `Batch`es, one source a model chunk."""

    def __init__(self, plan: Plan, loader: Iterator[dict[str, Any]] | None) -> None:
        self._plan = plan
        self._loader = loader
        self._makes_mask = not uses_transformer_engine(plan)

    def next_batch(self) -> Batch:
        """The next micro-batch; without a loader only the mask is given. Raises DataEndedError after the last one."""
        if self._loader is None:
            return Batch(tokens=None, labels=None, loss_mask=None, position_ids=None, attention_mask=self._mask(None))
        loaded = next(self._loader, None)
        if loaded is None:
            raise DataEndedError("the data set has no further whole micro-batch; prepare more text or train for less")
        sample = {key: value.to(torch.cuda.current_device(), non_blocking=True) for key, value in loaded.items()}
        if self._plan.settings.parallel.context_parallel_size > 1:
            sample = get_batch_on_this_cp_rank(sample)
        return Batch(
            tokens=sample["tokens"],
            labels=sample["labels"],
            loss_mask=sample["loss_mask"],
            position_ids=sample["position_ids"],
            attention_mask=self._mask(sample.get("attention_mask")),
        )

    def _mask(self, from_data: torch.Tensor | None) -> torch.Tensor | None:
        if from_data is not None or not self._makes_mask:
            return from_data
        return _causal_mask(self._plan.settings.data.seq_length or 0)


@functools.cache
def _causal_mask(length: int) -> torch.Tensor:
    """One mask for all sources of this rank: bool [1, 1, length, length], True above the diagonal."""
    ones = torch.ones((1, 1, length, length), dtype=torch.bool, device=torch.cuda.current_device())
    return torch.triu(ones, diagonal=1)
