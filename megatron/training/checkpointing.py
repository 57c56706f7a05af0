"""Saves and loads a rank's whole state through megatron-core's distributed checkpoints; resuming is exact.

`Checkpointer` is made once by `pretrain()`. Files and their wholeness are `checkpoint_files.py`'s matter, what may
be resumed from what is `checkpoint_facts.py`'s; here tensors and collectives come in.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from megatron.training import checkpoint_files
from megatron.training.checkpoint_facts import check_resume, facts_of, same_layout
from megatron.training.checkpoint_files import Checkpoint
from megatron.training.config import SettingsError
from megatron.training.layout import Plan
from megatron.training.model_setup import Trainee, gather_parameters
from megatron.training.optimizer_parts import fit_parts

# One representation whatever the layout, so that any layout can load it.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run stands: iterations done, samples consumed, iterations skipped for overflow."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0


class Checkpointer:
    """Saves to `--save` and loads from `--load`. All public methods are collective unless they say otherwise."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._background = AsyncCallsQueue()
        self._strategy: Any = None
        self._went_on_from = 0
        self._has_saved = False
        self.newest_saved: int | None = None
        """Iteration of the newest checkpoint in --save that is of this run's history."""

    def load(self, trainee: Trainee) -> tuple[Progress, tuple[str, ...]]:
        """Loads the newest whole checkpoint of `--load`, if there is one; gives the lines to tell the user.

        Raises SettingsError when there is none and `--exit-on-missing-checkpoint` asks for one, or when the
        checkpoint is of another model; nothing has been changed then.
        """
        settings = self._plan.settings.checkpoint
        if settings.load is None:
            return Progress(), ()
        checkpoint, lines = self._agree_on_checkpoint(Path(settings.load))
        if checkpoint is None:
            return Progress(), (f"no checkpoint in {settings.load}: starting at iteration 0",)
        progress = self._load_from(checkpoint, trainee)
        self._went_on_from = progress.iteration
        if settings.save and Path(settings.save).resolve() == Path(settings.load).resolve():
            self.newest_saved = progress.iteration
        if not same_layout(self._plan, checkpoint) and not settings.finetune:
            lines += ("loaded into another layout: random states start anew, dropout differs from a straight run",)
        return progress, (*lines, f"loaded {checkpoint.folder} at iteration {progress.iteration}")

    def save(self, trainee: Trainee, progress: Progress) -> None:
        """Saves to `--save`: at once, or with `--async-save` started here and finished by `poll`."""
        root = Path(self._plan.settings.checkpoint.save or "")
        self.poll(blocking=True)
        gather_parameters(self._plan, trainee)
        if torch.distributed.get_rank() == 0:
            for folder in () if self._has_saved else checkpoint_files.set_aside_later(root, self._went_on_from):
                print(f"WARNING: kept aside as {folder}: this run went on from before it", flush=True)
            checkpoint_files.begin(root, progress.iteration)
        self._has_saved = True
        torch.distributed.barrier()
        request = dist_checkpointing.save(
            self._state(trainee, progress, loading=False, with_rng=not self._plan.settings.checkpoint.no_save_rng),
            str(checkpoint_files.partial_folder_of(root, progress.iteration)),
            self._save_strategy(),
            validate_access_integrity=True,
            async_sharded_save=self._plan.settings.checkpoint.async_save,
            content_metadata=_METADATA,
        )
        facts = facts_of(self._plan, consumed_train_samples=progress.consumed_train_samples)
        iteration = progress.iteration
        if request is None:
            self._finish(root, iteration, facts)
            return
        request.add_finalize_fn(lambda: self._finish(root, iteration, facts))
        self._background.schedule_async_request(request)

    def poll(self, *, blocking: bool = False) -> None:
        """Finishes background saves that are written on all ranks; `blocking` waits for them. Cheap when none runs."""
        self._background.maybe_finalize_async_calls(blocking=blocking)

    def capture(self) -> dict[str, Any]:
        """What the next saves depend on, for the rank that takes this one's place.

        Raises StateError while a background save is not finished: it can't go on elsewhere.
        """
        if self.is_saving:
            from megatron.resilience.state.errors import StateError  # a run without resilience has none of it

            raise StateError("a background save is not finished, expected none at a boundary where a machine moves")
        return {
            "went_on_from": self._went_on_from,
            "has_saved": self._has_saved,
            "newest_saved": self.newest_saved,
            # All ranks compare the numbers of their background saves.
            "background_saves": self._background.call_idx,
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Takes over what another rank captured."""
        self._went_on_from, self._has_saved = values["went_on_from"], values["has_saved"]
        self.newest_saved, self._background.call_idx = values["newest_saved"], values["background_saves"]

    @property
    def is_saving(self) -> bool:
        """Whether a background save is not finished yet. Not collective."""
        return bool(self._background.get_num_unfinalized_calls())

    def _finish(self, root: Path, iteration: int, facts: dict[str, Any]) -> None:
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            checkpoint_files.finish(root, iteration, facts)
        torch.distributed.barrier()
        self.newest_saved = iteration

    def _agree_on_checkpoint(self, root: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
        """Rank 0 looks, all ranks hear: storage may show different things to different machines at one moment."""
        settings = self._plan.settings.checkpoint
        answer: list[Any] = [None, ()]
        if torch.distributed.get_rank() == 0:
            try:
                choice = checkpoint_files.find_checkpoint(root, settings.ckpt_step)
                lines = tuple(f"WARNING: passed over a damaged checkpoint: {text}" for text in choice.passed_over)
                answer = [choice.checkpoint, lines]
            except checkpoint_files.CheckpointError as error:
                answer = [error, ()]
        torch.distributed.broadcast_object_list(answer, src=0)
        found, lines = answer
        if isinstance(found, checkpoint_files.CheckpointError):
            raise SettingsError(str(found))
        if found is None and settings.exit_on_missing_checkpoint:
            raise SettingsError(f"--load {root} holds no checkpoint, and --exit-on-missing-checkpoint asks for one")
        if found is not None:
            check_resume(self._plan, found)
        return found, lines

    def _load_from(self, checkpoint: Checkpoint, trainee: Trainee) -> Progress:
        settings = self._plan.settings.checkpoint
        with_rng = self._loads_rng(checkpoint)
        wanted = self._state(trainee, Progress(), loading=True, with_rng=with_rng)
        strategy = get_default_load_sharded_strategy(str(checkpoint.folder))
        if settings.ckpt_fully_parallel_load:
            strategy = FullyParallelLoadStrategyWrapper(
                strategy, parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
        loaded = dist_checkpointing.load(wanted, str(checkpoint.folder), strategy)
        for index, module in enumerate(trainee.modules()):
            module.load_state_dict(loaded[_model_key(trainee, index)])
        if settings.finetune:
            trainee.optimizer.reload_model_params()
            return Progress()
        if self._with_optimizer():
            try:
                fitting = fit_parts(loaded["optimizer"], wanted["optimizer"])
            except ValueError as error:
                raise SettingsError(f"{checkpoint.folder}: {error}") from error
            trainee.optimizer.load_state_dict(fitting)
            trainee.scheduler.load_state_dict(loaded["opt_param_scheduler"])
        else:
            trainee.optimizer.reload_model_params()
        if with_rng:
            _set_rng_state(loaded["rng_state"])
        return Progress(**loaded["progress"])

    def _loads_rng(self, checkpoint: Checkpoint) -> bool:
        settings = self._plan.settings.checkpoint
        wanted = not settings.no_load_rng and not settings.finetune
        return wanted and bool(checkpoint.facts["rng_saved"]) and same_layout(self._plan, checkpoint)

    def _with_optimizer(self, *, loading: bool = True) -> bool:
        settings = self._plan.settings.checkpoint
        return not (settings.no_load_optim or settings.finetune) if loading else not settings.no_save_optim

    def _state(self, trainee: Trainee, progress: Progress, *, loading: bool, with_rng: bool) -> dict[str, Any]:
        """The sharded state dict: what to save, or the shape of what to load."""
        state: dict[str, Any] = {
            _model_key(trainee, index): module.sharded_state_dict(metadata=_METADATA)
            for index, module in enumerate(trainee.modules())
        }
        if self._with_optimizer(loading=loading):
            state["optimizer"] = trainee.optimizer.sharded_state_dict(
                dict(state), is_loading=loading, metadata=_METADATA
            )
        if with_rng:
            state["rng_state"] = ShardedObject(
                "rng_state", _rng_state(), (torch.distributed.get_world_size(),), (torch.distributed.get_rank(),)
            )
        state["opt_param_scheduler"] = trainee.scheduler.state_dict()
        state["progress"] = {
            "iteration": progress.iteration,
            "consumed_train_samples": progress.consumed_train_samples,
            "consumed_valid_samples": progress.consumed_valid_samples,
            "skipped_iterations": progress.skipped_iterations,
        }
        return state

    def _save_strategy(self) -> Any:
        """A strategy a save, or one for all of them where its plan may be kept."""
        settings = self._plan.settings.checkpoint
        if self._strategy is not None:
            return self._strategy
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strategy = get_default_save_sharded_strategy("torch_dist")
        strategy.thread_count = 1  # files are written by the rank itself, one each
        strategy.use_cached_ckpt_structure = settings.ckpt_assume_constant_structure
        if settings.ckpt_fully_parallel_save:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelSaveStrategyWrapper(strategy, group, settings.ckpt_assume_constant_structure)
        if settings.ckpt_assume_constant_structure:
            self._strategy = strategy
        return strategy


def _model_key(trainee: Trainee, index: int) -> str:
    return f"model{index}" if len(trainee.model) > 1 else "model"


def _rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        # Copies: the tracker goes on writing into its own tensors.
        "tracker": {name: state.clone() for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()},
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states({name: value.clone() for name, value in state["tracker"].items()})
