"""Where the runs of a proof save: each for itself, and none where the job itself does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.resilience.proof.script_settings import flag_value, setting

_NAME = "save"
_FLAG = f"--{_NAME}"


def saving_to(script: Sequence[str], folder: Path) -> tuple[str, ...]:
    """`script` with `folder` in the place of the one that it saves to, if it saves; also if its YAML file says so."""
    words = list(script)
    for place, word in enumerate(words):
        if word == _FLAG and place + 1 < len(words):
            words[place + 1] = str(folder)
        elif word.startswith(f"{_FLAG}="):
            words[place] = f"{_FLAG}={folder}"
    if flag_value(script, _NAME) is None and setting(script, _NAME):
        words += [_FLAG, str(folder)]
    return tuple(words)
