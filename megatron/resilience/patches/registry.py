"""The one way in which megatron-core is changed: named, versioned, reversible patches.

Each file beside this one repairs one megatron-core module and lists its `PATCHES`. `apply_patches()` is called by
`megatron.training.preload` right after the device is installed and before a model is built. A patch that does not
know the installed version, or the source that it replaces, refuses by name instead of guessing.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

PATCH_MODULES = (
    "distrib_optimizer",
    "filesystem_async",
    "gpt_dataset",
    "moe_utils",
    "optimizer",
    "p2p_communication",
    "tensor_parallel_random",
    "torch_norm",
)
_MISSING = object()
_applied: dict[str, tuple[Any, str, object]] = {}


class PatchError(RuntimeError):
    """A patch cannot be applied: megatron-core of an unknown version, or a target that is not there or another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One replaced attribute of one megatron-core module.

    `make(original)` gets the attribute found (None if there was none) and returns its replacement. `sources` are the
    `source_digest`s of all originals that it was written for.
    """

    name: str
    module: str
    attribute: str
    why: str
    versions: str
    make: Callable[[Any], Any]
    sources: tuple[str, ...] = ()
    """Empty: of a name that is not bound, or bound to what has no source here."""
    may_be_missing: bool = False
    cpu_only: bool = False


def all_patches() -> tuple[Patch, ...]:
    """Every patch of the project, in the order of PATCH_MODULES."""
    return tuple(
        patch
        for name in PATCH_MODULES
        for patch in importlib.import_module(f"megatron.resilience.patches.{name}").PATCHES
    )


def megatron_core_version() -> str:
    """Version of the installed megatron-core."""
    return str(importlib.import_module("megatron.core.package_info").__version__)


def apply_patches(
    patches: Iterable[Patch] | None = None, *, on_cuda: bool, version: str | None = None
) -> tuple[str, ...]:
    """Applies `patches` (default: all) and returns the names of those applied now; applied ones are left alone.

    Raises PatchError when a patch does not know `version` (default: the installed one) or the source of its target, or
    the target is missing; nothing has been changed then.
    """
    found = version or megatron_core_version()
    chosen = [p for p in (all_patches() if patches is None else patches) if not (p.cpu_only and on_cuda)]
    for patch in chosen:
        if Version(found) not in SpecifierSet(patch.versions):
            raise PatchError(
                f"patch {patch.name} of {patch.module}: found megatron-core {found}, expected {patch.versions}; "
                "install a known version or extend the patch after checking the module"
            )
    targets = [(patch, *_owner_of(patch)) for patch in chosen if patch.name not in _applied]
    for patch, owner, name in targets:
        _check_source(patch, owner.__dict__.get(name), found)
    for patch, owner, name in targets:
        original = owner.__dict__.get(name, _MISSING)
        _applied[patch.name] = (owner, name, original)
        setattr(owner, name, patch.make(None if original is _MISSING else original))
    return tuple(patch.name for patch, _, _ in targets)


def revert_patches(names: Iterable[str] | None = None) -> None:
    """Puts back what `apply_patches` replaced (default: everything), newest first."""
    for name in list(reversed(_applied)) if names is None else list(names):
        owner, attribute, original = _applied.pop(name)
        if original is _MISSING:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, original)


def applied_patches() -> tuple[str, ...]:
    """Names of the patches in force, oldest first."""
    return tuple(_applied)


def _owner_of(patch: Patch) -> tuple[Any, str]:
    owner: Any = importlib.import_module(patch.module)
    *path, name = patch.attribute.split(".")
    for step in path:
        owner = getattr(owner, step, None)
    if owner is None or (name not in owner.__dict__ and not patch.may_be_missing):
        raise PatchError(f"patch {patch.name}: {patch.module} has no {patch.attribute}; extend the patch")
    return owner, name


def source_digest(target: Any) -> str:
    """The first 16 digits of the SHA-256 of the source of a function. Raises OSError or TypeError if it has none."""
    source = inspect.getsource(getattr(target, "__func__", target))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _check_source(patch: Patch, target: Any, version: str) -> None:
    if not patch.sources:
        return
    try:
        digest = source_digest(target)
    except (OSError, TypeError) as error:
        digest = f"none that can be read ({error})"
    if digest not in patch.sources:
        raise PatchError(
            f"patch {patch.name}: {patch.module}.{patch.attribute} of megatron-core {version} has another source than "
            f"it was written for: found {digest}, expected {' or '.join(patch.sources)}. Install the package anew if "
            f"it was changed by hand; if this release is another, see whether it still needs the patch ({patch.why}) "
            "and add the digest to its sources"
        )
