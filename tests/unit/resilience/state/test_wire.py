"""The wire takes whole messages apart whatever the pieces, and takes nothing from who does not know the token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.resilience.state.errors import WireError
from megatron.resilience.state.wire import (
    CHUNK_HEADER_BYTES,
    MAC_BYTES,
    Ack,
    Failed,
    Hello,
    MessageReader,
    MessageType,
    Signer,
    Welcome,
    challenge,
    chunk_header,
    decode,
    encode,
    hello_nonce,
    read_challenge,
    read_chunk_header,
    total_digest,
)

ALL = frozenset(MessageType)
SIGNED = ALL - {MessageType.CHALLENGE, MessageType.CHUNK}
SIGNER = Signer(token="token", challenge_nonce=b"a" * 16, hello_nonce=b"b" * 16)
HELLO = Hello(job=b"j" * 32, generation=2, global_rank=3, layout=b"l" * 32, chunks_held=4, nonce=b"b" * 16)


def feed_all(reader: MessageReader, stream: bytes, cuts: list[int]) -> list[tuple[MessageType, bytes]]:
    """Gives `stream` in pieces as `cuts` say, never more than is wanted."""
    messages, place = [], 0
    while place < len(stream):
        size = min(reader.wanted(), cuts[place % len(cuts)], len(stream) - place)
        message = reader.feed(stream[place : place + size])
        place += size
        if message is not None:
            messages.append(message)
    return messages


@given(
    bodies=st.lists(st.tuples(st.sampled_from(sorted(SIGNED)), st.binary(max_size=20)), max_size=6),
    cuts=st.lists(st.integers(1, 50), min_size=1, max_size=5),
)
def test_messages_come_out_as_they_went_in_whatever_the_pieces(
    bodies: list[tuple[MessageType, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(SIGNER.seal(kind, body) for kind, body in bodies)
    found = [(kind, SIGNER.open(kind, sealed)) for kind, sealed in feed_all(MessageReader(ALL), stream, cuts)]
    assert found == bodies


@given(noise=st.binary(max_size=300), expected=st.frozensets(st.sampled_from(sorted(ALL)), min_size=1))
def test_noise_is_refused_or_waited_for_and_never_held_beyond_its_message(
    noise: bytes, expected: frozenset[MessageType]
) -> None:
    reader, place, refused = MessageReader(expected), 0, ""
    while place < len(noise) and not refused:
        assert reader.wanted() >= 1
        size = min(reader.wanted(), len(noise) - place)
        place += size
        try:
            message = reader.feed(noise[place - size : place])
            if message is not None and message[0] in SIGNED:
                SIGNER.open(*message)
        except WireError as error:
            refused = str(error)
    assert not refused or "expected" in refused or "not signed" in refused
    assert len(reader._buffer) <= place


def test_a_message_that_may_not_come_now_is_refused_before_its_body() -> None:
    reader = MessageReader(frozenset({MessageType.HELLO}))
    with pytest.raises(WireError, match="found a message of type 5, expected HELLO"):
        reader.feed(SIGNER.seal(MessageType.SMALL, b"")[: reader.wanted()])


@pytest.mark.parametrize("size", [0, 513, 2**32 - 1])
def test_a_length_that_its_type_cannot_have_is_refused_before_memory_is_taken(size: int) -> None:
    reader = MessageReader(ALL)
    with pytest.raises(WireError, match="expected 1 to 512"):
        reader.feed(size.to_bytes(4, "little") + bytes([MessageType.HELLO]))
    assert len(reader._buffer) <= 5


@given(place=st.integers(0, 10_000), kind=st.sampled_from(sorted(SIGNED)), body=st.binary(min_size=1, max_size=64))
def test_no_bit_of_a_signed_message_can_be_changed(place: int, kind: MessageType, body: bytes) -> None:
    sealed = bytearray(SIGNER.seal(kind, body)[5:])
    sealed[place // 8 % len(sealed)] ^= 1 << place % 8
    with pytest.raises(WireError, match="not signed"):
        SIGNER.open(kind, bytes(sealed))


@pytest.mark.parametrize(
    "other",
    [
        Signer(token="guess", challenge_nonce=b"a" * 16, hello_nonce=b"b" * 16),
        Signer(token="token", challenge_nonce=b"c" * 16, hello_nonce=b"b" * 16),
        Signer(token="token", challenge_nonce=b"a" * 16, hello_nonce=b"c" * 16),
    ],
    ids=["token", "challenge", "hello"],
)
def test_a_signature_holds_for_one_token_and_one_connection(other: Signer) -> None:
    sealed = other.seal(MessageType.VERDICT, encode("leave"))[5:]
    with pytest.raises(WireError, match="not signed"):
        SIGNER.open(MessageType.VERDICT, sealed)


def test_a_signature_holds_for_one_type_of_message() -> None:
    sealed = SIGNER.seal(MessageType.ACK, encode("leave"))[5:]
    with pytest.raises(WireError, match="a VERDICT is not signed"):
        SIGNER.open(MessageType.VERDICT, sealed)


def test_what_is_shorter_than_a_signature_is_refused() -> None:
    with pytest.raises(WireError, match="not signed"):
        SIGNER.open(MessageType.GOT, b"x" * (MAC_BYTES - 1))


@pytest.mark.parametrize(
    "body",
    [HELLO, Welcome(reason="", total_bytes=5, chunk_bytes=2), Ack(digest=b"d" * 32), Failed(reason="why"), "stay"],
    ids=lambda body: type(body).__name__,
)
def test_bodies_survive_the_way(body: Any) -> None:
    assert decode(encode(body), type(body)) == body
    with pytest.raises(WireError, match="is it the same release"):
        decode(b"\xc1", type(body))


@given(noise=st.binary(max_size=100))
def test_a_body_of_noise_is_a_body_or_an_error(noise: bytes) -> None:
    found: Hello | WireError
    try:
        found = decode(noise, Hello)
    except WireError as error:
        found = error
    assert isinstance(found, Hello) or "no Hello" in str(found)


def test_challenges_and_chunk_headers_survive_the_way() -> None:
    assert read_challenge(challenge(b"n" * 16)[5:]) == b"n" * 16
    header = chunk_header(7, 1 << 20, 2**64 - 1)
    assert len(header) == CHUNK_HEADER_BYTES
    found = read_chunk_header(header[5:])
    assert (found.index, found.length, found.checksum) == (7, 1 << 20, 2**64 - 1)


@pytest.mark.parametrize(
    "body", [b"", b"x" * 21, b"HTTP" + bytes(18), challenge(bytes(16))[5:9] + b"\x02\x00" + bytes(16)]
)
def test_another_protocol_or_version_is_named(body: bytes) -> None:
    with pytest.raises(WireError, match="expected"):
        read_challenge(body)
    with pytest.raises(WireError, match="CHUNK header"):
        read_chunk_header(body)


def test_a_hello_of_a_wrong_nonce_is_refused() -> None:
    hello = Hello(job=b"", generation=0, global_rank=0, layout=b"", chunks_held=0, nonce=b"short")
    with pytest.raises(WireError, match="nonce of 5 bytes"):
        hello_nonce(encode(hello) + bytes(MAC_BYTES))
    assert hello_nonce(encode(HELLO) + bytes(MAC_BYTES)) == HELLO.nonce


def test_the_digest_over_all_sees_layout_order_and_small_state() -> None:
    digests = {
        total_digest(b"layout", [1, 2], b"small"),
        total_digest(b"Layout", [1, 2], b"small"),
        total_digest(b"layout", [2, 1], b"small"),
        total_digest(b"layout", [1, 2], b"Small"),
        total_digest(b"layout", [1], b"small"),
    }
    assert len(digests) == 5
