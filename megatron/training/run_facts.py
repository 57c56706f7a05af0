"""What of a run must be equal on a machine that joins it: resolved settings, the data's files, the script.

Called by `switching.py` when a rank is built. Left out is what may differ from machine to machine: where data lies,
what was loaded at first, where logs go. A checkpoint is written by all ranks, so its folder is not left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.training.config import SUBJECTS
from megatron.training.config.flag import FlagSpec, flags_of
from megatron.training.data_files import parse_blend
from megatron.training.layout import Plan

PIECES = 256
"""Of a large file, evenly spaced from its first to its last byte."""

_FILES = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")
_ELSEWHERE = (
    *(*_FILES, *_TOKENIZER_FILES, "data_cache_path"),  # their content counts: `data_facts`
    *("load", "ckpt_step", "use_checkpoint_args", "exit_on_missing_checkpoint"),  # what was loaded comes with the state
    *("yaml_cfg", "preflight_only", "local_rank"),  # what they say has been resolved
    *("tensorboard_dir", "tensorboard_queue_size", "metrics_file"),
)
"""Settings that may differ from machine to machine."""


def setting_facts(plan: Plan) -> tuple[tuple[str, ...], str]:
    """(settings that are not the default as `--flag=value`, then derived sizes; SHA-256 of all settings and sizes)."""
    shown, every = list[str](), list[str]()
    for subject, settings_type in SUBJECTS.items():
        settings = getattr(plan.settings, subject)
        for spec in flags_of(settings_type):
            if spec.field_name in _ELSEWHERE:
                continue
            value = _value(spec, getattr(settings, spec.field_name))
            every.append(f"{subject}.{spec.field_name}={value!r}")
            if value != spec.default:
                shown.append(f"{spec.names[0]}={_readable(spec, value)}")
    for field in dataclasses.fields(plan):
        if field.name != "settings":
            line = f"{field.name}={getattr(plan, field.name)!r}"
            shown.append(line)
            every.append(line)
    return tuple(shown), hashlib.sha256("\n".join(every).encode()).hexdigest()


def data_facts(plan: Plan) -> tuple[str, ...]:
    """A line for each file that training reads: name, size, checksum. Raises OSError."""
    data = plan.settings.data
    lines = ["--mock-data=on"] if data.mock_data else []
    for name in _FILES:
        paths = getattr(data, name)
        for number, (weight, prefix) in enumerate(parse_blend(paths) if paths else ()):
            flag = f"--{name.replace('_', '-')} {number}"
            if weight is not None:
                lines.append(f"{flag} weight={weight!r}")
            lines.append(f"{flag} {Path(prefix).name}.idx={_print_of(Path(prefix + '.idx'), piece_bytes=1 << 20)}")
            lines.append(f"{flag} {Path(prefix).name}.bin={_print_of(Path(prefix + '.bin'), piece_bytes=1 << 12)}")
    for name in _TOKENIZER_FILES:
        path, flag = getattr(data, name), f"--{name.replace('_', '-')}"
        files = _files_below(Path(path)) if path is not None else []
        lines += [f"{flag} {file.name}={_print_of(file, piece_bytes=1 << 20)}" for file in files]
        if path is not None and not files:
            lines.append(f"{flag}={path}")
    return tuple(lines)


def script_fact() -> str:
    """Name and digest of the script of this process; empty where there is none."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None or not os.path.isfile(script):
        return ""
    return f"{Path(script).name}={hashlib.sha256(Path(script).read_bytes()).hexdigest()[:16]}"


def _value(spec: FlagSpec, value: Any) -> Any:
    return os.path.abspath(value) if spec.field_name == "save" and value is not None else value


def _readable(spec: FlagSpec, value: Any) -> str:
    if spec.is_switch:
        return "yes"
    return " ".join(" ".join(map(str, value)).split() if spec.many and value is not None else str(value).split())


def _files_below(path: Path) -> list[Path]:
    """A tokenizer is a file or a folder of files; a name that is neither is read from elsewhere."""
    return [path] if path.is_file() else sorted(file for file in path.glob("*") if file.is_file())


def _print_of(path: Path, *, piece_bytes: int) -> str:
    """Size and CRC-32: of the whole file, or of `PIECES` pieces of it where it is larger than these."""
    size, checksum = path.stat().st_size, 0
    with path.open("rb") as file:
        for offset in _offsets(size, piece_bytes):
            file.seek(offset)
            checksum = zlib.crc32(file.read(piece_bytes), checksum)
    return f"{size} bytes, checksum {checksum:08x}"


def _offsets(size: int, piece_bytes: int) -> Iterator[int]:
    if size <= PIECES * piece_bytes:
        yield from range(0, size, piece_bytes)
        return
    for number in range(PIECES):
        yield (size - piece_bytes) * number // (PIECES - 1)
