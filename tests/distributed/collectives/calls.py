"""Calls that something is done to, and how each ended. What ranks run, in their processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import trainmover_ext
from tests.distributed.collectives import chaos, runner

LARGE = 600_000
"""Elements: many messages, on links."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call ended on one rank."""

    error: str
    culprit: int | None
    at: float
    """time.monotonic(), the same clock in all processes."""
    message: str = ""


def outcome_of(call: Callable[[], object]) -> Outcome:
    try:
        call()
    except trainmover_ext.CollectiveError as error:
        return Outcome(
            error=type(error).__name__, culprit=chaos.culprit_of(error), at=time.monotonic(), message=str(error)
        )
    return Outcome(error="none", culprit=None, at=time.monotonic())


def all_reduce(group: int, count: int = 100, repeat: int = 1) -> None:
    for _ in range(repeat):
        runner.groups().handles[group].allreduce([torch.ones(count)]).wait()


def receive(group: int, source: int) -> None:
    runner.groups().handles[group].recv([torch.ones(10)], source, 9).wait()


def send(group: int, to: int, count: int) -> None:
    runner.groups().handles[group].send([torch.ones(count)], to, 9).wait()


def barrier() -> None:
    runner.groups().direct.barrier()


def try_call(function: Callable[..., object], *arguments: object) -> Outcome:
    return outcome_of(lambda: function(*arguments))
