"""Plain values are those that a message carries exactly; they come back as the kinds that were there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.resilience.state.errors import StateError
from megatron.resilience.state.plain_values import INTEGER_MAX, checked, is_plain, plain_values

LEAVES = st.none() | st.booleans() | st.integers(-INTEGER_MAX, INTEGER_MAX) | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@given(value=PLAIN)
def test_what_is_plain_survives_a_message_exactly(value: Any) -> None:
    assert is_plain(value)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value)) == value


@pytest.mark.parametrize("value", [2**63, {1: 2}, {3}, torch.zeros(1), object(), [object()], b"bytes", 1j])
def test_what_is_not_is_left_out(value: Any) -> None:
    assert not is_plain(value)
    assert plain_values({"kept": 1, "value": value, "left": 2}, leave_out=frozenset({"left"})) == {"kept": 1}


def test_tuples_come_back_as_tuples() -> None:
    assert checked("group", {"betas": [0.9, 0.95]}, {"betas": (0.9, 0.999)}) == {"betas": (0.9, 0.95)}


def test_a_number_may_become_another_kind_of_number() -> None:
    assert checked("group", {"lr": 0.1, "step": 3}, {"lr": 0, "step": None}) == {"lr": 0.1, "step": 3}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"a": "text"}, "found 'text', expected a value like 1"),
        ({"a": True}, "found True"),
        ({}, "'a' is on one rank only"),
        ({"a": 1, "b": 2}, "'b' is on one rank only"),
    ],
)
def test_another_kind_or_name_is_refused_by_name(found: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        checked("group", found, {"a": 1})


def test_names_may_differ_where_the_caller_says_so() -> None:
    assert checked("group", {"b": 2}, {"a": 1}, same_names=False) == {"b": 2}
