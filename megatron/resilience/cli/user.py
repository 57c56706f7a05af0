"""How the commands of a user find their job: flags, environment, or the newest job under the log directory."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from megatron.resilience.agent.environment import control_settings, inherited_environment
from megatron.resilience.agent.failure import EXIT_FAILURE, EXIT_OK
from megatron.resilience.cli.tls_flags import add_tls_flags, tls_files
from megatron.resilience.cli.usage import FlagParser, UsageError
from megatron.resilience.controller.client import ControllerClient
from megatron.resilience.controller.directory import DirectoryError, ResilienceDirectory, newest
from megatron.resilience.controller.store import StoreError, read_ledger
from megatron.resilience.protocol.journal import JournalError, Ledger

LOG_ROOT = Path("build/logs")


def user_parser(name: str, description: str) -> FlagParser:
    """A parser with the flags that all commands share."""
    parser = FlagParser(prog=f"trainmover {name}", description=description, allow_abbrev=False)
    parser.add_argument(
        "--resilience-dir",
        type=Path,
        metavar="DIR",
        help=f"of the job (default: TRAINMOVER_RESILIENCE_DIR, else the newest under {LOG_ROOT})",
    )
    add_tls_flags(parser)
    return parser


def find_directory(options: argparse.Namespace) -> ResilienceDirectory | None:
    """Of the job that is meant; None if the environment alone says where its controller is. Raises UsageError."""
    settings = control_settings(inherited_environment())
    if options.resilience_dir is not None:
        return ResilienceDirectory(path=options.resilience_dir)
    if settings.resilience_dir:
        return ResilienceDirectory(path=Path(settings.resilience_dir))
    if settings.controller and settings.token:
        return None
    directory = newest(LOG_ROOT)
    if directory is None:
        raise UsageError(
            f"found no job under {LOG_ROOT}, expected one that `trainmover run --resilience` started; "
            "pass its --resilience-dir"
        )
    return directory


def read_end(directory: ResilienceDirectory | None) -> Ledger | None:
    """What the journal of a job has, if it can be read here and says that the job is over."""
    ledger = None if directory is None else read_journal(directory)
    return ledger if ledger is not None and ledger.ended else None


def read_journal(directory: ResilienceDirectory) -> Ledger | None:
    """What the journal of a job has; None where there is none that can be read."""
    try:
        return read_ledger(directory.journal) if directory.journal.exists() else None
    except (StoreError, JournalError):
        return None


def describe_end(ledger: Ledger) -> str:
    """`the job ended at 2024-05-01 12:00:00, exit 0: all ranks have finished`."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ledger.ended_ms / 1000))
    code = EXIT_OK if ledger.ended_ok else EXIT_FAILURE
    return f"the job {'ended' if ledger.ended_ok else 'failed'} at {when}, exit {code}: {ledger.ended_why}"


def find_client(options: argparse.Namespace) -> ControllerClient:
    """The controller of the job that is meant. Raises UsageError."""
    directory = find_directory(options)
    if directory is None:
        settings = control_settings(inherited_environment())
        return ControllerClient(where=settings.controller, token=settings.token, tls=tls_files(options))
    try:
        token = directory.read_token()
        directory.read_address()
    except DirectoryError as error:
        raise UsageError(str(error)) from error
    return ControllerClient(where=str(directory.path), token=token, tls=tls_files(options))
