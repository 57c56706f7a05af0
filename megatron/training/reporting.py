"""What a run tells: Megatron-LM's log line, exact metrics as JSON lines, TensorBoard. One reporter, on the last rank.

The log line is what users and their scripts know from Megatron-LM; its numbers are rounded, so whoever compares bits
reads `--metrics-file`. Called by `loop.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from megatron.training.layout import Plan
from megatron.training.step import StepResult


@dataclass(slots=True)
class _Interval:
    """What has come since the last log line."""

    iterations: int = 0
    samples: int = 0
    skipped: int = 0
    not_finite: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    started_s: float = 0.0


def log_line(plan: Plan, iteration: int, consumed_samples: int, step: StepResult, interval: dict[str, Any]) -> str:
    """One line in Megatron-LM's form. `interval` has `elapsed_ms` and `samples` an iteration, `skipped`, `not_finite`
    and mean `losses`.
    """
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{plan.train_iters:8d}",
        f" consumed samples: {consumed_samples:12d}",
        f" elapsed time per iteration (ms): {interval['elapsed_ms']:.1f}",
    ]
    if plan.settings.logging.log_throughput:
        tokens = interval["samples"] * (plan.settings.data.seq_length or 0)
        tokens_per_s = tokens / interval["elapsed_ms"] * 1000
        parts.append(f" throughput (tokens/s): {tokens_per_s:.1f}")
    parts += [f" learning rate: {step.learning_rate:.6E}", f" global batch size: {step.samples:5d}"]
    parts += [f" {name}: {value:.6E}" for name, value in interval["losses"].items()]
    parts.append(f" loss scale: {step.loss_scale:.1f}")
    if step.grad_norm is not None:
        parts.append(f" grad norm: {step.grad_norm:.3f}")
    if step.zeros_in_grad is not None:
        parts.append(f" num zeros: {step.zeros_in_grad}")
    if interval.get("params_norm") is not None:
        parts.append(f" params norm: {interval['params_norm']:.3f}")
    parts += [f" number of skipped iterations: {interval['skipped']:3d}"]
    parts += [f" number of nan iterations: {interval['not_finite']:3d} "]
    return " |".join(parts) + "|"


class Reporter:
    """Collects the steps of one rank and writes where the settings say; silent unless `speaks`."""

    def __init__(self, plan: Plan, *, speaks: bool) -> None:
        self._plan = plan
        self._speaks = speaks
        self._interval = _Interval(started_s=time.perf_counter())
        self._metrics: IO[str] | None = None
        self._tensorboard: Any = None

    def start(self) -> None:
        """Opens the metrics file and TensorBoard's folder, appending to what an earlier run left."""
        settings = self._plan.settings.logging
        if self._speaks and settings.metrics_file:
            Path(settings.metrics_file).parent.mkdir(parents=True, exist_ok=True)
            self._metrics = open(settings.metrics_file, "a", encoding="utf-8")  # noqa: SIM115 (closed in stop)
        if self._speaks and settings.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                log_dir=settings.tensorboard_dir, max_queue=settings.tensorboard_queue_size
            )
        self._interval = _Interval(started_s=time.perf_counter())

    def stop(self) -> None:
        """Closes what `start` opened."""
        if self._metrics:
            self._metrics.close()
        if self._tensorboard:
            self._tensorboard.close()
        self._metrics = self._tensorboard = None

    def say(self, text: str) -> None:
        """Prints a line, on the rank that speaks."""
        if self._speaks:
            print(text, flush=True)

    def step(self, iteration: int, consumed_samples: int, result: StepResult, params_norm: float | None) -> None:
        """Takes in the step that ended `iteration`; prints a line every `--log-interval` iterations."""
        interval = self._interval
        interval.iterations += 1
        interval.samples += result.samples
        interval.skipped += result.skipped
        finite = all(abs(value) < float("inf") for value in result.losses.values())
        interval.not_finite += not finite
        if finite and not result.skipped:
            for name, value in result.losses.items():
                interval.losses[name] = interval.losses.get(name, 0.0) + value
        self._record(iteration, consumed_samples, result)
        settings = self._plan.settings.logging
        if iteration % settings.tensorboard_log_interval == 0:
            self._plot(iteration, result)
        if iteration % settings.log_interval == 0:
            self.say(log_line(self._plan, iteration, consumed_samples, result, self._means(params_norm)))
            self._interval = _Interval(started_s=time.perf_counter())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside (evaluation, saving) does not count as time of training iterations."""
        began_s = time.perf_counter()
        yield
        self._interval.started_s += time.perf_counter() - began_s

    def evaluation(self, iteration: int, split: str, losses: dict[str, float]) -> None:
        """Prints and records the losses of one evaluation."""
        shown = " | ".join(f"{name} value: {value:.6E}" for name, value in losses.items())
        self.say(f" {split} loss at iteration {iteration} | {shown} |")
        self._write({"kind": "evaluation", "iteration": iteration, "split": split, "losses": losses})
        for name, value in losses.items():
            if self._tensorboard:
                self._tensorboard.add_scalar(f"{name} {split}", value, iteration)

    def digests(self, iteration: int, digests: list[str], small: list[str]) -> None:
        """Records the two digests of each rank's state, by global rank."""
        self._write({"kind": "state", "iteration": iteration, "sha256": digests, "small_sha256": small})

    def capture(self) -> dict[str, Any]:
        """What has come since the last log line, for the rank that takes this one's place."""
        values = dataclasses.asdict(self._interval)
        return {**values, "started_s": time.perf_counter() - self._interval.started_s}

    def restore(self, values: dict[str, Any]) -> None:
        """Takes over what another rank captured; its clock began elsewhere, so time is told by how long ago."""
        self._interval = _Interval(**{**values, "started_s": time.perf_counter() - values["started_s"]})

    def _means(self, params_norm: float | None) -> dict[str, Any]:
        interval = self._interval
        counted = max(1, interval.iterations - interval.skipped - interval.not_finite)
        return {
            "elapsed_ms": (time.perf_counter() - interval.started_s) * 1000 / interval.iterations,
            "samples": interval.samples / interval.iterations,
            "skipped": interval.skipped,
            "not_finite": interval.not_finite,
            "losses": {name: total / counted for name, total in interval.losses.items()},
            "params_norm": params_norm,
        }

    def _record(self, iteration: int, consumed_samples: int, result: StepResult) -> None:
        self._write(
            {
                "kind": "step",
                "iteration": iteration,
                "consumed_samples": consumed_samples,
                "losses": result.losses,
                "grad_norm": result.grad_norm,
                "learning_rate": result.learning_rate,
                "loss_scale": result.loss_scale,
                "skipped": result.skipped,
            }
        )
        # Apart from the step, which is the same in every run of a job.
        self._write({"kind": "time", "iteration": iteration, "ended_s": time.time()})

    def _write(self, record: dict[str, Any]) -> None:
        if self._metrics:
            self._metrics.write(json.dumps(record) + "\n")  # floats in shortest form that reads back exactly
            self._metrics.flush()

    def _plot(self, iteration: int, result: StepResult) -> None:
        if not self._tensorboard:
            return
        values = {**result.losses, "learning-rate": result.learning_rate, "batch-size": result.samples}
        values |= {"loss-scale": result.loss_scale}
        if result.grad_norm is not None:
            values["grad-norm"] = result.grad_norm
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, iteration)
