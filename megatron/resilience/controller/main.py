"""`trainmover controller`: runs the controller of one job until the job is over. It may be killed at any moment.

Started again on the same resilience directory, on whatever port, it goes on where the journal ends; agents find it by
the address that it leaves there. Called by `trainmover run`, or by hand, or by a service manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.resilience.agent.environment import control_settings, inherited_environment
from megatron.resilience.agent.failure import EXIT_FAILURE, EXIT_OK
from megatron.resilience.agent.signals import is_ignored
from megatron.resilience.cli.tls_flags import add_tls_flags, tls_files
from megatron.resilience.cli.usage import FlagParser, UsageError
from megatron.resilience.controller import wire
from megatron.resilience.controller.directory import DirectoryError, ResilienceDirectory, draw_token
from megatron.resilience.controller.event_log import EventLog
from megatron.resilience.controller.server import ControllerServer
from megatron.resilience.controller.shell import Controller, Linger
from megatron.resilience.controller.store import SqliteStore, Store, StoreError, describe_job
from megatron.resilience.protocol.controller_words import JobSpec
from megatron.resilience.protocol.journal import JournalError

_LOG = logging.getLogger(__name__)
_TICK_S = 0.2
_ANY_HOST = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """What to control, and where."""

    spec: JobSpec
    directory: ResilienceDirectory
    listen: str
    advertise: str
    """Host under which agents reach it; empty: the one it listens on."""
    tls: wire.TlsFiles | None
    linger: Linger


def main(argv: Sequence[str]) -> int:
    """Runs it. Returns the exit code; raises UsageError."""
    config = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        return run(config, sqlite_store(config))
    except (StoreError, JournalError, DirectoryError, wire.TlsError, OSError, RuntimeError) as error:
        print(f"trainmover: error: {error}", file=sys.stderr)
        return EXIT_FAILURE


def sqlite_store(config: ControllerConfig) -> Store:
    """The journal of the resilience directory, opened. Raises StoreError, OSError."""
    config.directory.make()
    spec = config.spec
    description = describe_job(spec.job, slots=spec.slots, ranks_per_machine=spec.ranks_per_machine)
    store = SqliteStore(config.directory.journal, description=description)
    store.open()
    return store


def run(config: ControllerConfig, store: Store) -> int:
    """Serves until the job is over or a signal comes, then closes `store`. Raises what the journal or disk does."""
    event_log = EventLog(config.directory.events)
    try:
        token = _settle_token(config.directory)
        event_log.open()
        asyncio.run(_serve(config, store, event_log, token))
    finally:
        event_log.close()
        store.close()
    return EXIT_OK


def _settle_token(directory: ResilienceDirectory) -> str:
    """The token of the environment, else of the directory, else a new one; kept in the directory."""
    given = control_settings(inherited_environment()).token
    if not given and directory.token_file.exists():
        return directory.read_token()
    token = given or draw_token()
    directory.write_token(token)
    return token


async def _serve(config: ControllerConfig, store: Store, event_log: EventLog, token: str) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if not is_ignored(number):
            loop.add_signal_handler(number, stop.set)
    controller = Controller(config.spec, store, event_log, on_failure=stop.set, linger=config.linger)
    server = ControllerServer(controller, token=token)
    port = await server.start(config.listen, config.tls)
    host = config.advertise or config.listen.rpartition(":")[0]
    config.directory.write_address(f"{host}:{port}")
    _LOG.info("controller of job %s, term %d, at %s:%d", config.spec.job, store.term, host, port)
    while not stop.is_set() and not controller.may_end:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _TICK_S)
        controller.tick()
    if controller.may_end and (untold := controller.core.untold()):
        _LOG.warning("the job is over; machines that have not come to hear of it: %s", ", ".join(untold))
    await server.stop()
    if controller.failure is not None:
        raise controller.failure


def parse_arguments(argv: Sequence[str]) -> ControllerConfig:
    """Reads the command line. Raises UsageError."""
    parser = FlagParser(
        prog="trainmover controller",
        description="Controls the membership of one job; training itself never needs it.",
        allow_abbrev=False,
    )
    parser.add_argument("--resilience-dir", type=Path, required=True, metavar="DIR", help="journal, token, address")
    parser.add_argument("--job", required=True, metavar="NAME", help="of the job, the same for all its agents")
    parser.add_argument("--machines", type=int, required=True, metavar="M", help="slots of the job")
    parser.add_argument("--ranks-per-machine", type=int, required=True, metavar="L")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default 127.0.0.1, a free port")
    parser.add_argument("--advertise", default="", metavar="HOST", help="host under which agents reach it")
    parser.add_argument(
        "--linger",
        type=float,
        default=Linger().away_s,
        metavar="SECONDS",
        help="how long machines that are away are waited for when the job is over",
    )
    add_tls_flags(parser)
    options = parser.parse_flags(list(argv))
    for flag, value in (("--machines", options.machines), ("--ranks-per-machine", options.ranks_per_machine)):
        if value < 1:
            raise UsageError(f"found {flag} {value}, expected at least 1")
    host, _, port = options.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"found --listen {options.listen}, expected HOST:PORT, port 0 for a free one")
    if not options.advertise and host.strip("[]") in _ANY_HOST:
        raise UsageError(
            f"found --listen {options.listen}, which names no host that agents could call, expected --advertise HOST "
            "with it"
        )
    return ControllerConfig(
        spec=JobSpec(job=options.job, slots=options.machines, ranks_per_machine=options.ranks_per_machine),
        directory=ResilienceDirectory(path=options.resilience_dir),
        listen=options.listen,
        advertise=options.advertise,
        tls=tls_files(options),
        linger=Linger(away_s=options.linger),
    )
