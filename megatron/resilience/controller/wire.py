"""How agents and users reach a controller: names, metadata, limits, credentials. Used by both ends of the connection.

One gRPC service of two calls whose messages are the protocol's own bytes: `Attach`, a stream each way, for an agent;
`Ask`, one command and a stream of answers, for a user. Every call bears the job's token and the wire's version.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from megatron.resilience.protocol.messages import MESSAGE_BYTES_MAX

SERVICE = "trainmover.Controller"
ATTACH = "Attach"
ASK = "Ask"

WIRE_VERSION = "3"
"""Of the messages; raised when either end could not read the other's."""

TOKEN_KEY = "trainmover-token"
VERSION_KEY = "trainmover-wire-version"

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A peer whose network has gone says nothing: ask it, also while no call is made.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.enable_retries", 0),
    ("grpc.so_reuseport", 0),
    # Nobody dials the controller through a proxy, whatever the environment says.
    ("grpc.enable_http_proxy", 0),
)


class TlsError(Exception):
    """Files of a certificate that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one end. With them both ends show a certificate, and check the other's against `authority`."""

    authority: Path
    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(authority, certificate, key). Raises TlsError."""
        contents = []
        for path in (self.authority, self.certificate, self.key):
            try:
                contents.append(path.read_bytes())
            except OSError as error:
                raise TlsError(f"found {path} not readable ({error.strerror}), expected a PEM file") from error
        return contents[0], contents[1], contents[2]


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For a server that asks its clients for a certificate."""
    authority, certificate, key = files.read()
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=authority, require_client_auth=True)


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """For a client that shows one."""
    authority, certificate, key = files.read()
    return grpc.ssl_channel_credentials(root_certificates=authority, private_key=key, certificate_chain=certificate)


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What every call bears."""
    return ((TOKEN_KEY, token), (VERSION_KEY, WIRE_VERSION))


def refusal(received: Iterable[tuple[str, str | bytes]], token: str) -> tuple[grpc.StatusCode, str] | None:
    """Why a call with this metadata is refused, or None. The token is compared in constant time."""
    found = dict(received)
    told = found.get(TOKEN_KEY, "")
    told_bytes = told.encode() if isinstance(told, str) else told
    if not hmac.compare_digest(told_bytes, token.encode()):
        return (
            grpc.StatusCode.UNAUTHENTICATED,
            "found another token than the job's, expected that in its resilience directory; set TRAINMOVER_TOKEN to it",
        )
    version = found.get(VERSION_KEY, "none")
    if version != WIRE_VERSION:
        return (
            grpc.StatusCode.FAILED_PRECONDITION,
            f"found version {version!s} of the control messages, expected {WIRE_VERSION}; install the same trainmover "
            "on all machines",
        )
    return None
