"""Checkpoints as files: which exist, which are whole, which is the newest; written so that a kill cannot fool anyone.

A checkpoint is the folder `iter_0000020` below the save folder. It is written as `.partial-iter_0000020`, gets its
manifest last (every file with its size, the model's shape, the layout), and takes its name by one rename; only
then does the tracker file name it. The tracker is a hint: `find_checkpoint` trusts the manifest alone. Where the same
iteration is saved again, the older folder steps aside as `.replaced-iter_0000020` and counts until the newer one has
its name. No torch: the preflight reads checkpoints too.
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
_NAME = re.compile(r"(?:\.replaced-)?(iter_([0-9]{7,}))")


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


def replaced_folder_of(root: Path, iteration: int) -> Path:
    """Folder of the older checkpoint of `iteration` while a newer one takes its name."""
    return root / f".replaced-iter_{iteration:07d}"


def find_checkpoint(root: Path, iteration: int | None = None) -> Choice:
    """The newest whole checkpoint below `root`, or exactly that of `iteration`.

    Raises CheckpointError when `iteration` is given and its checkpoint is missing or damaged, or when `root` holds
    checkpoints and none is whole (starting anew would silently lose them), or when `root` cannot be listed.
    """
    if iteration is not None:
        found = _read_iteration(root, iteration)
        if isinstance(found, str):
            raise CheckpointError(f"{found}; give another --ckpt-step, or leave it out for the newest whole")
        return Choice(checkpoint=found)
    passed_over: list[str] = []
    for saved in reversed(saved_iterations(root)):
        found = _read_iteration(root, saved)
        if not isinstance(found, str):
            return Choice(checkpoint=found, passed_over=tuple(passed_over))
        passed_over.append(found)
    if passed_over:
        raise CheckpointError(
            f"no whole checkpoint in {root}: {'; '.join(passed_over)}; move the folder away to start anew"
        )
    return Choice(checkpoint=None)


def saved_iterations(root: Path) -> tuple[int, ...]:
    """Iterations that have a folder below `root`, ascending, whole or not; CheckpointError if it cannot be listed."""
    try:
        names = [entry.name for entry in root.iterdir()]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(f"{root}: {error.strerror}; give a folder of checkpoints") from error
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    # Only as this file writes it: a longer number with zeros before it is somebody else's folder.
    return tuple(sorted({int(match[2]) for match in matches if folder_of(root, int(match[2])).name == match[1]}))


def damage_of(folder: Path) -> str:
    """Why `folder` is not a whole checkpoint, in a few words; empty if it is whole.

    Every file must be there with the size that the manifest tells; contents are not read.
    """
    found = _read(folder)
    return found if isinstance(found, str) else ""


def set_aside_later(root: Path, iteration: int) -> tuple[Path, ...]:
    """Renames the checkpoints after `iteration`, so that they are kept but no longer found; gives their new folders.

    For a run that goes on from `iteration` although later ones exist: the newest must be of its own history.
    """
    moved = []
    for later in saved_iterations(root):
        for folder in (folder_of(root, later), replaced_folder_of(root, later)):
            if later > iteration and folder.exists():
                name = f".set-aside-{folder.name.removeprefix('.replaced-')}"
                taken = len(list(root.glob(f"{name}*")))
                aside = root / (f"{name}-{taken + 1}" if taken else name)
                folder.rename(aside)
                moved.append(aside)
    return tuple(moved)


def begin(root: Path, iteration: int) -> Path:
    """Makes the empty partial folder for `iteration`, dropping what a killed save left, and returns it."""
    root.mkdir(parents=True, exist_ok=True)
    for replaced in sorted(root.glob(".replaced-iter_*")):
        final = root / replaced.name.removeprefix(".replaced-")
        if damage_of(final) and not damage_of(replaced):  # killed before the newer one had its name
            _remove(final)
            replaced.rename(final)
        else:
            _remove(replaced)
    for leftover in sorted(root.glob(".partial-iter_*")):
        _remove(leftover)
    partial = partial_folder_of(root, iteration)
    partial.mkdir()
    return partial


def finish(root: Path, iteration: int, facts: dict[str, Any]) -> None:
    """Turns the partial folder of `iteration` into a whole checkpoint and names it in the tracker. Blocks on fsync."""
    partial, final = partial_folder_of(root, iteration), folder_of(root, iteration)
    entries = sorted(partial.rglob("*"))
    files = {str(path.relative_to(partial)): path.stat().st_size for path in entries if path.is_file()}
    manifest = {"manifest_version": MANIFEST_VERSION, "iteration": iteration, "files": files, "facts": facts}
    for path in entries:
        _sync(path)
    _write(partial / MANIFEST, json.dumps(manifest, indent=1))
    _sync(partial)
    replaced = replaced_folder_of(root, iteration)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _sync(root)
    _write(root / f".{TRACKER}.new", str(iteration))
    (root / f".{TRACKER}.new").rename(root / TRACKER)
    _sync(root)
    _remove(replaced)


def _read_iteration(root: Path, iteration: int) -> Checkpoint | str:
    """The whole checkpoint of `iteration`, or which folder is damaged and how."""
    final, replaced = folder_of(root, iteration), replaced_folder_of(root, iteration)
    found = _read(final)
    if isinstance(found, str):
        older = _read(replaced)
        return f"{final}: {found}" if isinstance(older, str) else older
    return found


def _read(folder: Path) -> Checkpoint | str:
    """The checkpoint in `folder` if it is whole, else its damage. Raises nothing, whatever lies there."""
    try:
        if not folder.is_dir():
            return "not there"
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        damage = _damage_of_manifest(folder, manifest) or _damage_of_files(folder, manifest["files"])
    except FileNotFoundError:
        return f"has no {MANIFEST}, so its save never finished"
    except (OSError, ValueError, RecursionError) as error:
        return f"has an unreadable {MANIFEST} ({type(error).__name__})"
    return damage or Checkpoint(folder=folder, iteration=manifest["iteration"], facts=manifest["facts"])


def _damage_of_manifest(folder: Path, manifest: Any) -> str:
    if not isinstance(manifest, dict) or manifest.get("manifest_version") != MANIFEST_VERSION:
        return f"has a {MANIFEST} of another version"
    iteration = manifest.get("iteration")
    if type(iteration) is not int or folder_of(folder.parent, iteration).name != folder.name.removeprefix(".replaced-"):
        return f"has the {MANIFEST} of iteration {iteration!r}"
    files, facts = manifest.get("files"), manifest.get("facts")
    if not (isinstance(files, dict) and files and isinstance(facts, dict)):
        return f"has a {MANIFEST} without files or facts"
    outside = [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]
    return f"has a {MANIFEST} that names {outside[0]!r}, outside of it" if outside else ""


def _damage_of_files(folder: Path, files: dict[str, Any]) -> str:
    for name, size in files.items():
        path = folder / name
        try:
            found = path.stat().st_size if path.is_file() else None
        except OSError:
            found = None
        if found is None:
            return f"lacks {name!r}"
        if found != size:
            return f"{name!r} has {found} bytes, expected {size!r}"
    return ""


def _remove(path: Path) -> None:
    """Removes what lies at `path`, folder or file, if anything does."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
