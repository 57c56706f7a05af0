"""Frames of the local socket: cut anywhere, bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.resilience.agent.rank_frames import FRAME_BYTES_MAX, FrameError, FrameReader, frame, socket_address


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_payloads_come_out_whole_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    reader, found, at = FrameReader(), [], 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        found += reader.feed(stream[at : at + size])
        at += size
    assert found == payloads


def test_frame_over_the_limit_is_refused_by_both_ends() -> None:
    with pytest.raises(FrameError, match="expected at most"):
        frame(bytes(FRAME_BYTES_MAX + 1))
    reader = FrameReader(bytes_max=10)
    assert reader.feed(frame(bytes(10))) == [bytes(10)]
    with pytest.raises(FrameError, match="a frame of 11 bytes, expected at most 10"):
        reader.feed(frame(bytes(11))[:4])


def test_at_sign_stands_for_a_name_that_is_no_file() -> None:
    assert socket_address("@name") == "\0name"
    assert socket_address("/run/agent") == "/run/agent"
