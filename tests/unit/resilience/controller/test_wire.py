"""Who is let in: the token first, then the version of the messages."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from megatron.resilience.controller import wire


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (wire.metadata("secret"), None),
        (wire.metadata("Secret"), grpc.StatusCode.UNAUTHENTICATED),
        (wire.metadata("secre"), grpc.StatusCode.UNAUTHENTICATED),
        (wire.metadata(""), grpc.StatusCode.UNAUTHENTICATED),
        ((), grpc.StatusCode.UNAUTHENTICATED),
        (((wire.VERSION_KEY, wire.WIRE_VERSION),), grpc.StatusCode.UNAUTHENTICATED),
        (((wire.TOKEN_KEY, "secret"),), grpc.StatusCode.FAILED_PRECONDITION),
        (((wire.TOKEN_KEY, "secret"), (wire.VERSION_KEY, "0")), grpc.StatusCode.FAILED_PRECONDITION),
        (((wire.TOKEN_KEY, "wrong"), (wire.VERSION_KEY, "0")), grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_refusals(found: tuple[tuple[str, str], ...], code: grpc.StatusCode | None) -> None:
    refused = wire.refusal(found, "secret")
    assert (refused and refused[0]) == code
    assert refused is None or "secret" not in refused[1]


def test_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    files = wire.TlsFiles(authority=tmp_path / "ca.pem", certificate=tmp_path / "c.pem", key=tmp_path / "k.pem")
    with pytest.raises(wire.TlsError, match=r"ca\.pem not readable"):
        files.read()


def test_every_option_is_one_that_the_library_knows() -> None:
    (library,) = Path(grpc.__file__).parent.glob("_cython/cygrpc*.so")
    known = library.read_bytes()
    # A name that it does not know is passed over in silence: servers hung up on agents that had nothing to say.
    assert [name for name, _ in wire.OPTIONS if name.encode() + b"\0" not in known] == []
