"""What a script's arguments set, on the command line or in the YAML file that they name. The command line wins.

What is wrong with either is not told here: the job itself says it before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def setting(script: Sequence[str], name: str) -> str | None:
    """The value of `name`, such as `save-interval`; None if nothing sets it."""
    given = flag_value(script, name)
    if given is not None:
        return given
    file = flag_value(script, "yaml-cfg")
    value = None if file is None else _from_yaml(Path(file), name)
    return None if value is None else str(value)


def flag_value(script: Sequence[str], name: str) -> str | None:
    """The last value that the command line gives to `--name`; None if none."""
    value, flag = None, f"--{name}"
    for place, word in enumerate(script):
        if word == flag and place + 1 < len(script):
            value = script[place + 1]
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value


def _from_yaml(path: Path, name: str) -> Any:
    """Keys are names of flags or fields, flat or by subject."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    value = None
    for key, item in content.items() if isinstance(content, dict) else ():
        for inner, inner_item in item.items() if isinstance(item, dict) else ((key, item),):
            if str(inner).replace("_", "-") == name and inner_item is not None:
                value = inner_item
    return value
