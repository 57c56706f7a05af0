"""The flags for mutual TLS between controller, agents and users: three files at each end, all or none."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.resilience.cli.usage import UsageError
from megatron.resilience.controller.wire import TlsError, TlsFiles


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them."""
    group = parser.add_argument_group("mutual TLS", "PEM files; without them connections are not encrypted")
    group.add_argument("--tls-authority", type=Path, metavar="FILE", help="certificate that signed the other end's")
    group.add_argument("--tls-certificate", type=Path, metavar="FILE", help="of this end")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="of this end's certificate")


def tls_files(options: argparse.Namespace) -> TlsFiles | None:
    """What was given, or None. Raises UsageError for a part of it, or files that cannot be read."""
    given = (options.tls_authority, options.tls_certificate, options.tls_key)
    if not any(given):
        return None
    if not all(given):
        raise UsageError(
            "found some of --tls-authority, --tls-certificate, --tls-key, expected all three or none; "
            "without any, connections are not encrypted"
        )
    files = TlsFiles(authority=given[0].absolute(), certificate=given[1].absolute(), key=given[2].absolute())
    try:
        files.read()
    except TlsError as error:
        raise UsageError(str(error)) from error
    return files


def tls_words(files: TlsFiles | None) -> tuple[str, ...]:
    """The flags that give `files` to another command."""
    if files is None:
        return ()
    given = (("authority", files.authority), ("certificate", files.certificate), ("key", files.key))
    return tuple(word for name, path in given for word in (f"--tls-{name}", str(path)))
