"""Numbers, words and lists of an object's attributes, and putting them back. Pure. Called by `small_state.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.resilience.state.errors import StateError

INTEGER_MAX = 2**63 - 1


def is_plain(value: object) -> bool:
    """Whether `value` survives the way over the wire exactly: numbers, text, None, and lists and dicts of them."""
    if value is None or isinstance(value, bool | float | str):
        return True
    if isinstance(value, int):
        return -INTEGER_MAX <= value <= INTEGER_MAX
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return isinstance(value, dict) and all(isinstance(key, str) and is_plain(item) for key, item in value.items())


def plain_values(source: Mapping[str, Any], *, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The plain values of `source` under text keys; what is not plain is not a value, or is sent in another way."""
    return {
        key: value for key, value in source.items() if isinstance(key, str) and key not in leave_out and is_plain(value)
    }


def checked(what: str, found: Mapping[str, Any], here: Mapping[str, Any], *, same_names: bool = True) -> dict[str, Any]:
    """`found` as values for `here`: of the same kinds, tuples where they were. Raises StateError otherwise.

    `same_names`: whether a name that only one of them has is an error too.
    """
    if same_names and set(found) != set(here):
        differing = sorted(set(found) ^ set(here))
        raise StateError(f"{what}: {differing[0]!r} is on one rank only; do both run the same versions and settings?")
    return {key: _as_kind(f"{what}, {key!r}", value, here.get(key)) for key, value in found.items()}


def _as_kind(what: str, value: Any, here: Any) -> Any:
    if isinstance(here, tuple) and isinstance(value, list | tuple):
        return tuple(value)
    if value is None or here is None or type(value) is type(here):
        return value
    if {type(value), type(here)} == {int, float}:
        return value  # such as a rate that is 0 before the first step and 0.1 after it
    raise StateError(f"{what}: found {value!r}, expected a value like {here!r}; do both ranks run the same versions?")
