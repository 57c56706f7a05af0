"""The flags of `trainmover run` that have to do with `--resilience`, and what is refused of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.resilience.cli.network import Namespaces, NetworkError
from megatron.resilience.cli.tls_flags import add_tls_flags, tls_files
from megatron.resilience.cli.usage import UsageError
from megatron.resilience.controller.directory import ResilienceDirectory

ISOLATIONS = ("none", "netns")


def add_resilience_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them."""
    group = parser.add_argument_group("resilience", "machines that can be replaced while the job runs")
    group.add_argument("--resilience", action="store_true", help="run a controller, and an agent on each machine")
    group.add_argument("--resilience-dir", type=Path, metavar="DIR", help="default: `resilience` in the log directory")
    group.add_argument("--elastic", type=int, default=0, metavar="E", help="further machines, to join when asked")
    group.add_argument(
        "--isolation",
        choices=ISOLATIONS,
        default="none",
        help="netns: a network namespace for each machine, joined by a bridge (root needed)",
    )
    add_tls_flags(parser)


def check_resilience(options: argparse.Namespace) -> None:
    """Raises UsageError for what cannot be."""
    if not options.resilience:
        given = (
            ("--elastic", options.elastic != 0),
            ("--resilience-dir", options.resilience_dir is not None),
            ("--isolation", options.isolation != "none"),
            ("--tls-authority", options.tls_authority is not None),
            ("--tls-certificate", options.tls_certificate is not None),
            ("--tls-key", options.tls_key is not None),
        )
        for flag, is_given in given:
            if is_given:
                raise UsageError(f"found {flag} without --resilience, expected both; pass --resilience too")
        return
    tls_files(options)
    if options.elastic < 0:
        raise UsageError(f"found --elastic {options.elastic}, expected 0 or more machines that wait to join")
    if options.isolation == "netns":
        try:
            Namespaces.check(options.machines + options.elastic)
        except NetworkError as error:
            raise UsageError(str(error)) from error
    directory = resilience_directory(options.resilience_dir, options.log_dir)
    if directory is not None and directory.journal.exists():
        flag = "--log-dir" if options.resilience_dir is None else "--resilience-dir"
        raise UsageError(
            f"found the journal of another job, {directory.journal}, expected none; pass another {flag}, or remove "
            f"{directory.path} once that job is over"
        )


def resilience_directory(chosen: Path | None, log_dir: Path | None) -> ResilienceDirectory | None:
    """Where a job with these flags keeps its journal; None while neither was chosen: then both are new."""
    if chosen is not None:
        return ResilienceDirectory(path=chosen.absolute())
    return None if log_dir is None else ResilienceDirectory(path=(log_dir / "resilience").absolute())
