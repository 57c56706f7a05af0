"""The training loop: step, log, evaluate, save, end. Its top is the only place where a switch may happen.

Called by `pretrain()` with everything built. Order within an iteration, on every rank the same: boundary, step with
the vote in it, bookkeeping, log, finished background saves, evaluation, save, ending.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, update_num_microbatches

from megatron.training.checkpointing import Checkpointer, Progress
from megatron.training.data import BatchSource, build_loader
from megatron.training.ending import Ending
from megatron.training.initialize import note_iteration
from megatron.training.layout import Plan
from megatron.training.membership import Membership
from megatron.training.model_setup import Trainee
from megatron.training.parameter_norm import parameter_norm
from megatron.training.reporting import Reporter
from megatron.training.step import ForwardStep, evaluate, train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    """Data sets by split; None where this rank reads none or the split is empty."""

    train: Any
    valid: Any
    test: Any


class TrainingLoop:
    """Runs one rank's part of the job from `progress` to the last iteration."""

    def __init__(
        self,
        plan: Plan,
        trainee: Trainee,
        datasets: Datasets,
        forward_step: ForwardStep,
        checkpointer: Checkpointer,
        reporter: Reporter,
    ) -> None:
        self._plan = plan
        self._trainee = trainee
        self._datasets = datasets
        self._forward_step = forward_step
        self._checkpointer = checkpointer
        self._reporter = reporter
        self._valid_sources: list[BatchSource] | None = None
        self._prepared: tuple[int, list[BatchSource]] | None = None

    def prepare(self, progress: Progress) -> None:
        """Makes now what else `run` begins with: loaders of the training data, and their processes. Not collective."""
        consumed = progress.consumed_train_samples
        self._prepared = (consumed, self._sources(self._datasets.train, consumed))

    def run(self, progress: Progress, membership: Membership) -> Ending:
        """Trains until the end; `progress` is brought forward. Collective."""
        plan, run = self._plan, self._plan.settings.run
        if self._prepared is None or self._prepared[0] != progress.consumed_train_samples:
            self.prepare(progress)
        assert self._prepared is not None
        (_, sources), self._prepared = self._prepared, None
        ending = Ending.GOES_ON
        with _garbage_collection(run.manual_gc):
            while not self._is_over(progress) and ending is Ending.GOES_ON:
                iteration = progress.iteration + 1
                membership.reach_boundary(iteration)
                note_iteration(plan, iteration)
                update_num_microbatches(progress.consumed_train_samples, consistency_check=True, verbose=True)
                result = train_step(
                    *(plan, self._trainee, sources, self._forward_step, iteration),
                    before_update=lambda: membership.vote(progress.iteration + 1, self._obstacles(progress)),
                )
                progress.iteration += 1
                progress.consumed_train_samples += result.samples
                progress.skipped_iterations += result.skipped
                self._reporter.step(progress.iteration, progress.consumed_train_samples, result, self._norm(progress))
                self._checkpointer.poll()
                with self._reporter.paused(), membership.paused():
                    if run.eval_interval and run.eval_iters and progress.iteration % run.eval_interval == 0:
                        self._evaluate_valid(progress)
                    saved = self._save_if_due(progress)
                ending = membership.ending(progress.iteration)
                if ending is not Ending.GOES_ON and not saved:
                    self.save(progress)
                if run.manual_gc and run.manual_gc_interval and progress.iteration % run.manual_gc_interval == 0:
                    gc.collect()
        return ending

    def finish(self, progress: Progress, ending: Ending) -> None:
        """After the last iteration: final save, final evaluations, background saves done. Collective."""
        self._checkpointer.poll(blocking=True)
        is_saved = self._checkpointer.newest_saved == progress.iteration
        if ending is Ending.GOES_ON and not is_saved and not self._plan.settings.run.skip_train:
            self.save(progress)
        if ending is Ending.GOES_ON and self._plan.settings.run.eval_iters:
            self._evaluate_valid(progress)
            self._evaluate("test", self._datasets.test, self._sources(self._datasets.test, 0, wraps=True), progress)
        self._checkpointer.poll(blocking=True)

    def save(self, progress: Progress) -> None:
        """Saves where `--save` says; does nothing without it."""
        if self._plan.settings.checkpoint.save is None:
            return
        started_s = time.perf_counter()
        self._checkpointer.save(self._trainee, progress)
        word = "started in the background" if self._plan.settings.checkpoint.async_save else "saved"
        elapsed_ms = (time.perf_counter() - started_s) * 1000
        self._reporter.say(f" checkpoint at iteration {progress.iteration:7d} {word} ({elapsed_ms:.0f} ms)")

    def _is_over(self, progress: Progress, *, iterations_more: int = 0) -> bool:
        if self._plan.settings.run.skip_train or progress.iteration + iterations_more >= self._plan.train_iters:
            return True
        if self._plan.settings.run.train_samples is None:
            return False
        samples_more = iterations_more * get_current_global_batch_size()
        return bool(progress.consumed_train_samples + samples_more >= self._plan.train_samples)

    def _obstacles(self, progress: Progress) -> tuple[str, ...]:
        """Why machines must not be switched at the next boundary."""
        settings = self._plan.settings.checkpoint
        reasons = {
            "the last iteration": self._is_over(progress, iterations_more=1),
            "a save is not finalised": self._checkpointer.is_saving,
            # It would run on beyond the boundary, where a rank that joined knows nothing of it.
            "a background save begins": settings.async_save
            and settings.save is not None
            and self._is_save_due(progress.iteration + 1),
        }
        return tuple(reason for reason, holds in reasons.items() if holds)

    def _is_save_due(self, iteration: int) -> bool:
        interval = self._plan.settings.checkpoint.save_interval
        return bool(interval and iteration % interval == 0)

    def _save_if_due(self, progress: Progress) -> bool:
        due = self._is_save_due(progress.iteration)
        if due:
            self.save(progress)
        return due

    def _sources(self, dataset: Any, consumed_samples: int, *, wraps: bool = False) -> list[BatchSource]:
        """One source a model chunk: each chunk that reads data walks the same samples by itself."""
        return [
            BatchSource(self._plan, build_loader(self._plan, dataset, consumed_samples=consumed_samples, wraps=wraps))
            for _ in self._trainee.model
        ]

    def _evaluate_valid(self, progress: Progress) -> None:
        if self._valid_sources is None:
            self._valid_sources = self._sources(self._datasets.valid, progress.consumed_valid_samples, wraps=True)
        progress.consumed_valid_samples += self._evaluate(
            "validation", self._datasets.valid, self._valid_sources, progress
        )

    def _evaluate(self, split: str, dataset: Any, sources: list[BatchSource], progress: Progress) -> int:
        if not _some_rank_has(dataset):
            return 0
        losses, samples = evaluate(self._plan, self._trainee, sources, self._forward_step)
        self._reporter.evaluation(progress.iteration, split, losses)
        return samples

    def _norm(self, progress: Progress) -> float | None:
        settings = self._plan.settings.logging
        if not settings.log_params_norm or progress.iteration % settings.log_interval:
            return None
        return parameter_norm(self._plan, self._trainee)


def _some_rank_has(dataset: Any) -> bool:
    """Whether any rank holds `dataset`: middle stages read none and must evaluate all the same. Collective."""
    flag = torch.tensor([int(dataset is not None)], device=torch.cuda.current_device())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


@contextlib.contextmanager
def _garbage_collection(manual: bool) -> Iterator[None]:
    """Turns the automatic collector off for a while if `manual`."""
    if not manual:
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
