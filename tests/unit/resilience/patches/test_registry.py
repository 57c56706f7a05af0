"""Patches are named, versioned, all or nothing, and reversible."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.resilience.patches import registry
from megatron.resilience.patches.registry import Patch, PatchError, apply_patches, revert_patches


@pytest.fixture
def target() -> Iterator[Any]:
    """A module with a function and a class, importable by name."""
    module = types.ModuleType("patched_module")
    module.double = lambda x: 2 * x  # type: ignore[attr-defined]
    module.Thing = type("Thing", (), {"size": lambda self: 1})  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def patch(**changes: Any) -> Patch:
    values: dict[str, Any] = {
        "name": "twice-as-much",
        "module": "patched_module",
        "attribute": "double",
        "why": "a test",
        "versions": ">=0.16,<0.17",
        "make": lambda original: lambda x: 2 * original(x),
    }
    return Patch(**{**values, **changes})


def apply(*patches: Patch, version: str = "0.16.1", on_cuda: bool = False) -> tuple[str, ...]:
    return apply_patches(patches, version=version, on_cuda=on_cuda)


def test_a_patch_replaces_and_can_be_reversed(target: Any) -> None:
    original = target.double
    assert apply(patch()) == ("twice-as-much",)
    assert target.double(3) == 12
    revert_patches(["twice-as-much"])
    assert target.double is original


def test_a_patch_is_applied_once(target: Any) -> None:
    apply(patch())
    assert apply(patch()) == ()
    assert target.double(3) == 12
    revert_patches(["twice-as-much"])


def test_a_method_is_patched_in_its_class(target: Any) -> None:
    apply(patch(attribute="Thing.size", make=lambda original: lambda self: original(self) + 1))
    assert target.Thing().size() == 2
    revert_patches(["twice-as-much"])
    assert target.Thing().size() == 1


def test_a_missing_name_is_bound_and_removed_again(target: Any) -> None:
    apply(patch(attribute="absent", may_be_missing=True, make=lambda original: original))
    assert target.absent is None
    revert_patches(["twice-as-much"])
    assert not hasattr(target, "absent")


def test_an_unknown_version_is_refused_by_name_and_nothing_changes(target: Any) -> None:
    original = target.double
    good, bad = patch(name="good", versions=">=0.1"), patch(name="bad")
    with pytest.raises(PatchError, match=r"patch bad of patched_module: found megatron-core 0\.17\.0"):
        apply(good, bad, version="0.17.0")
    assert target.double is original


def test_a_missing_target_is_refused_and_nothing_changes(target: Any) -> None:
    original = target.double
    with pytest.raises(PatchError, match=r"has no Thing\.absent"):
        apply(patch(), patch(name="other", attribute="Thing.absent"))
    assert target.double is original


def halve(x: int) -> int:
    return x // 2


def test_a_source_that_is_not_the_known_one_is_refused_by_name_and_nothing_changes(target: Any) -> None:
    original, known = target.double, registry.source_digest(target.double)
    good, careful = patch(name="good", attribute="Thing.size"), patch(name="careful", sources=("0" * 16, known))
    assert apply(good, careful) == ("good", "careful")
    revert_patches(["good", "careful"])
    size, target.double = target.Thing.__dict__["size"], halve
    with pytest.raises(
        PatchError, match=rf"patch careful: patched_module\.double .* 0{{16}} or {known}\. Install the"
    ) as refused:
        apply(good, careful)
    assert registry.source_digest(halve) in str(refused.value)
    assert target.double is halve
    assert target.Thing.__dict__["size"] is size
    target.double = len
    with pytest.raises(PatchError, match=r"found none that can be read"):
        apply(good, careful)
    target.double = staticmethod(original)
    assert registry.source_digest(target.double) == known


def test_every_patch_knows_the_source_that_it_replaces() -> None:
    from megatron.training import preload  # noqa: F401  (applies them all)

    names = registry.applied_patches()
    revert_patches()
    try:
        for p in registry.all_patches():
            owner, name = registry._owner_of(p)
            found = owner.__dict__.get(name)
            assert (registry.source_digest(found) in p.sources) if p.sources else p.may_be_missing, p.name
    finally:
        assert set(apply_patches(on_cuda=False)) == set(names)


def test_a_cpu_patch_is_left_out_on_cuda(target: Any) -> None:
    assert apply(patch(cpu_only=True), on_cuda=True) == ()


def test_every_patch_of_the_project_names_target_why_and_versions() -> None:
    patches = registry.all_patches()
    assert len({p.name for p in patches}) == len(patches)
    for p in patches:
        assert all(getattr(p, field.name) not in ("", None) for field in dataclasses.fields(p)), p.name
        assert p.module.startswith("megatron.core.")
        assert len(p.why) > 20, p.name


def test_every_patch_can_be_taken_back_and_applied_again() -> None:
    from megatron.training import preload  # noqa: F401  (applies them all)

    names = registry.applied_patches()
    targets = {name: registry._applied[name] for name in names}
    revert_patches()
    for name, (owner, attribute, original) in targets.items():
        if original is not registry._MISSING:
            assert owner.__dict__[attribute] is original, name
    assert set(apply_patches(on_cuda=False)) == set(names)
