"""Where the runs of a proof save: each for itself, and none where the job itself does. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_FLAG = "--save"


def saving_to(script: Sequence[str], folder: Path) -> tuple[str, ...]:
    """`script` with `folder` in the place of the one that it saves to, if it saves."""
    words = list(script)
    for place, word in enumerate(words):
        if word == _FLAG and place + 1 < len(words):
            words[place + 1] = str(folder)
        elif word.startswith(f"{_FLAG}="):
            words[place] = f"{_FLAG}={folder}"
    return tuple(words)
