"""Digests of our own files, as they are installed here: the version's number is the same in every checkout.

One line a folder of sources, and one for the built extension. Told by agents and ranks; imports none of what it reads.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
from pathlib import Path

_PACKAGES = ("megatron.training", "megatron.resilience", "trainmover_ext")
_EXTENSION = ("trainmover_ext", "_C")


@functools.cache
def own_sources() -> str:
    """`megatron/training=1a2b3c4d5e6f7081` and so on, as of the first call in this process or the one it was forked
    from. What is not installed is left out.
    """
    lines = []
    for package in _PACKAGES:
        root = _root_of(package)
        if root is not None:
            lines += folder_lines(root, package.replace(".", "/"))
    library = _library()
    if library is not None:
        lines.append(f"{library.name}={_digest(library.read_bytes())}")
    return "\n".join(lines)


def folder_lines(root: Path, name: str) -> list[str]:
    """One line for each folder at or below `root` that has Python sources; `name` is what `root` is called."""
    folders: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        folders.setdefault(path.parent.relative_to(root).as_posix(), []).append(path)
    lines = []
    for folder, paths in folders.items():
        content = b"".join(f"{path.name} {_digest(path.read_bytes())}\n".encode() for path in paths)
        lines.append(f"{name if folder == '.' else f'{name}/{folder}'}={_digest(content)}")
    return lines


def _root_of(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


def _library() -> Path | None:
    """The file that `import trainmover_ext._C` loads."""
    root = _root_of(_EXTENSION[0])
    if root is None:
        return None
    paths = (root / f"{_EXTENSION[1]}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
