"""Checkpoints as files: which exist, which are whole, which is the newest; written so that a kill cannot fool anyone.

A checkpoint is the folder `iter_0000020` below the save folder. It is written as `.partial-iter_0000020`, gets its
manifest last (every file with its size, the model's shape, the layout), and takes its name by one rename; only
then does the tracker file name it. The tracker is a hint: `find_checkpoint` trusts the manifest alone. No torch:
the preflight reads checkpoints too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "trainmover_manifest.json"
MANIFEST_VERSION = 1
_NAME = re.compile(r"iter_(\d{7,})")


class CheckpointError(ValueError):
    """A checkpoint asked for is missing or damaged, and no other can take its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint: its folder, iteration and what its manifest says beside the files."""

    folder: Path
    iteration: int
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The checkpoint to load, or None, with the reasons why newer ones were passed over."""

    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...] = ()


def folder_of(root: Path, iteration: int) -> Path:
    """Final folder of the checkpoint of `iteration`."""
    return root / f"iter_{iteration:07d}"


def partial_folder_of(root: Path, iteration: int) -> Path:
    """Folder in which the checkpoint of `iteration` is written; never loaded."""
    return root / f".partial-iter_{iteration:07d}"


def find_checkpoint(root: Path, iteration: int | None = None) -> Choice:
    """The newest whole checkpoint below `root`, or exactly that of `iteration`.

    Raises CheckpointError when `iteration` is given and its checkpoint is missing or damaged, or when `root` holds
    checkpoints and none is whole (starting anew would silently lose them).
    """
    if iteration is not None:
        folder = folder_of(root, iteration)
        damage = damage_of(folder)
        if damage:
            raise CheckpointError(f"{folder}: {damage}; give another --ckpt-step, or leave it out for the newest whole")
        return Choice(checkpoint=_read(folder))
    passed_over: list[str] = []
    for found in sorted(saved_iterations(root), reverse=True):
        folder = folder_of(root, found)
        damage = damage_of(folder)
        if not damage:
            return Choice(checkpoint=_read(folder), passed_over=tuple(passed_over))
        passed_over.append(f"{folder}: {damage}")
    if passed_over:
        raise CheckpointError(
            f"no whole checkpoint in {root}: {'; '.join(passed_over)}; move the folder away to start anew"
        )
    return Choice(checkpoint=None)


def saved_iterations(root: Path) -> tuple[int, ...]:
    """Iterations whose final folder exists below `root`, ascending, whole or not."""
    if not root.is_dir():
        return ()
    matches = (_NAME.fullmatch(entry.name) for entry in root.iterdir())
    return tuple(sorted(int(match[1]) for match in matches if match))


def damage_of(folder: Path) -> str:
    """Why `folder` is not a whole checkpoint, in a few words; empty if it is whole.

    Every file must be there with the size that the manifest tells; contents are not read.
    """
    if not folder.is_dir():
        return "not there"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except FileNotFoundError:
        return f"has no {MANIFEST}, so its save never finished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"has an unreadable {MANIFEST} ({type(error).__name__})"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"lacks {name}"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, expected {size}"
    return ""


def begin(root: Path, iteration: int) -> Path:
    """Makes the empty partial folder for `iteration`, dropping what a killed save left, and returns it."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".partial-iter_*"):
        shutil.rmtree(leftover)
    partial = partial_folder_of(root, iteration)
    partial.mkdir()
    return partial


def finish(root: Path, iteration: int, facts: dict[str, Any]) -> None:
    """Turns the partial folder of `iteration` into a whole checkpoint and names it in the tracker. Blocks on fsync."""
    partial, final = partial_folder_of(root, iteration), folder_of(root, iteration)
    files = {
        str(path.relative_to(partial)): path.stat().st_size for path in sorted(partial.rglob("*")) if path.is_file()
    }
    manifest = {"manifest_version": MANIFEST_VERSION, "iteration": iteration, "files": files, "facts": facts}
    for name in files:
        _sync(partial / name)
    _write(partial / MANIFEST, json.dumps(manifest, indent=1))
    _sync(partial)
    replaced = root / f".partial-iter_{iteration:07d}-replaced"
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _sync(root)
    _write(root / f".{TRACKER}.new", str(iteration))
    (root / f".{TRACKER}.new").rename(root / TRACKER)
    _sync(root)
    shutil.rmtree(replaced, ignore_errors=True)


def _read(folder: Path) -> Checkpoint:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return Checkpoint(folder=folder, iteration=int(manifest["iteration"]), facts=dict(manifest["facts"]))


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
