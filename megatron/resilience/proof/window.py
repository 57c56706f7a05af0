"""Ends a job a few iterations after the checkpoint that it goes on from. Reads Megatron's tracker file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.resilience.proof.script_settings import setting

_TRACKER = "latest_checkpointed_iteration.txt"


def window_flags(script: Sequence[str], window: int | None) -> tuple[str, ...]:
    """Arguments that end the job `window` iterations after its start; none without a window. Raises ValueError."""
    if window is None:
        return ()
    if window < 2:
        raise ValueError(f"found --window {window}, expected at least 2: one iteration before the switch, one after it")
    load = setting(script, "load")
    if not load:
        raise ValueError(
            "found --window without --load in the script's arguments, expected the checkpoint to start from"
        )
    if setting(script, "exit-interval") is not None:
        raise ValueError("found --exit-interval in the script's arguments, which --window sets itself; leave it out")
    end = _iteration_of(script, Path(load)) + window
    # The job ends at the first multiple of the interval: none may lie between the checkpoint and its end.
    return ("--exit-interval", str(end))


def _iteration_of(script: Sequence[str], folder: Path) -> int:
    step = setting(script, "ckpt-step")
    if step is not None:
        if not step.isdecimal():
            raise ValueError(f"found --ckpt-step {step}, expected the iteration of a checkpoint")
        return int(step)
    try:
        return int((folder / _TRACKER).read_text(encoding="utf-8").strip())
    except (OSError, ValueError) as error:
        raise ValueError(f"found no {_TRACKER} with a number in {folder}, expected a checkpoint folder") from error
