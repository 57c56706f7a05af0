"""The checksum sees every changed bit, moved word and missing byte, at any length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.resilience.state.checksum import checksum

LENGTHS = (0, 1, 8, 8191, 8192, 8193, 100_000)


def noise(length: int) -> bytearray:
    return bytearray(np.random.default_rng(length).bytes(length))


@given(length=st.sampled_from(LENGTHS[1:]), place=st.integers(0, 2**40))
def test_one_changed_bit_is_seen(length: int, place: int) -> None:
    memory = noise(length)
    before = checksum(memory)
    memory[place // 8 % length] ^= 1 << place % 8
    assert checksum(memory) != before


@given(words=st.sets(st.integers(0, 100_000 // 8 - 1), min_size=2, max_size=2))
def test_two_words_that_changed_places_are_seen(words: set[int]) -> None:
    memory = noise(100_000)
    before = checksum(memory)
    first, second = (slice(8 * word, 8 * word + 8) for word in words)
    memory[first], memory[second] = memory[second], memory[first]
    assert checksum(memory) != before


def test_the_length_counts_even_when_all_is_zero() -> None:
    assert len({checksum(bytes(length)) for length in LENGTHS}) == len(LENGTHS)


def test_rows_that_changed_places_are_seen() -> None:
    memory = noise(4 * 8192)
    turned = memory[8192:] + memory[:8192]
    assert checksum(turned) != checksum(memory)


@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_64_bits_and_the_same_for_any_view(length: int) -> None:
    memory = noise(length)
    assert 0 <= checksum(memory) < 2**64
    assert checksum(memoryview(b"x" + memory)[1:]) == checksum(bytes(memory))


def test_its_value_is_part_of_the_wire_and_does_not_change() -> None:
    assert f"{checksum(bytes(range(256)) * 64):016x}" == "3af7dbe7865644ad"
