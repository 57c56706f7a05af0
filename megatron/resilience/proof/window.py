"""Ends a job a few iterations after the checkpoint that it goes on from. Reads Megatron's tracker file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_TRACKER = "latest_checkpointed_iteration.txt"


def window_flags(script: Sequence[str], window: int | None) -> tuple[str, ...]:
    """Arguments that end the job `window` iterations after its start; none without a window. Raises ValueError."""
    if window is None:
        return ()
    if window < 2:
        raise ValueError(f"found --window {window}, expected at least 2: one iteration before the switch, one after it")
    if "--load" not in script:
        raise ValueError(
            "found --window without --load in the script's arguments, expected the checkpoint to start from"
        )
    if "--exit-interval" in script:
        raise ValueError("found --exit-interval in the script's arguments, which --window sets itself; leave it out")
    folder = Path(script[list(script).index("--load") + 1])
    end = _iteration_of(script, folder) + window
    # The job ends at the first multiple of the interval: none may lie between the checkpoint and its end.
    return ("--exit-interval", str(end))


def _iteration_of(script: Sequence[str], folder: Path) -> int:
    if "--ckpt-step" in script:
        return int(script[list(script).index("--ckpt-step") + 1])
    try:
        return int((folder / _TRACKER).read_text().strip())
    except (OSError, ValueError) as error:
        raise ValueError(f"found no {_TRACKER} with a number in {folder}, expected a checkpoint folder") from error
