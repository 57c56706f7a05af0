"""`trainmover run`: checks everything that can be checked before a rank starts, then hands over to the job.

A mistake in the command line, in the script's arguments (if the script has a `preflight`), a busy port or a log
directory that can't be written is told in one line, with exit code 2, within a second or two.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.resilience.agent import process_tree
from megatron.resilience.agent.environment import (
    JobShape,
    default_environment,
    inherited_environment,
    rank_environment,
)
from megatron.resilience.agent.failure import EXIT_FAILURE, EXIT_OK, EXIT_USAGE
from megatron.resilience.agent.lifecycle import Limits
from megatron.resilience.agent.rank_start import StartMode
from megatron.resilience.agent.script import ScriptFacts, read_script_facts
from megatron.resilience.agent.spawner import split_at_script
from megatron.resilience.cli.job import Job, JobConfig
from megatron.resilience.cli.resilience_flags import add_resilience_flags, check_resilience
from megatron.resilience.cli.usage import FlagParser, UsageError
from megatron.resilience.cli.view import open_view

_LOOPBACK = "127.0.0.1"
_DEFAULT_LOG_ROOT = Path("build/logs")
_PREFLIGHT_S_MAX = 300.0
_TRIES_MAX = 100


def main(argv: Sequence[str]) -> int:
    """Runs a job. Returns its exit code; raises UsageError if it can't start."""
    own, script = split_at_script(argv)
    options = _parser().parse_flags(own)
    _check(options, script)
    facts = _facts(Path(script[0]))
    shape = JobShape(
        machines=options.machines,
        ranks_per_machine=options.ranks_per_machine,
        master_addr=_LOOPBACK,
        master_port=options.port if options.port is not None else _free_port(),
    )
    process_tree.become_subreaper()
    if facts.has_preflight:
        code = _preflight(script, shape)
        if code != EXIT_OK:
            return code
    config = JobConfig(
        shape=shape,
        script=script[0],
        arguments=tuple(script[1:]),
        start=StartMode(options.start),
        log_dir=_make_log_dir(options.log_dir),
        limits=Limits(grace_s=options.grace_period),
    )
    if options.resilience:
        from megatron.resilience.cli.run_resilient import run_resilient

        return run_resilient(config, options)
    return Job(config, open_view(sys.stdout)).run()


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="trainmover run",
        usage="trainmover run [flags] -- SCRIPT ARGS...",
        description="Starts a training job on this computer, as M machines of L ranks each.",
        allow_abbrev=False,
    )
    parser.add_argument("--machines", type=int, default=1, metavar="M", help="machines of the job (default 1)")
    parser.add_argument("--ranks-per-machine", type=int, default=1, metavar="L", help="ranks on each (default 1)")
    parser.add_argument(
        "--start",
        choices=[mode.value for mode in StartMode],
        default=StartMode.FORK.value,
        help="fork: import once a machine, then fork its ranks (default); exec: a new Python for each rank",
    )
    parser.add_argument("--port", type=int, help="where rank 0 listens (default: a free one)")
    parser.add_argument("--log-dir", type=Path, help=f"one file a rank (default {_DEFAULT_LOG_ROOT}/TIME)")
    parser.add_argument(
        "--grace-period", type=float, default=Limits().grace_s, metavar="SECONDS", help="from a signal to the kill"
    )
    add_resilience_flags(parser)
    return parser


def _check(options: argparse.Namespace, script: list[str]) -> None:
    if not script:
        raise UsageError("found no script, expected one after `--`; run `trainmover run --machines 2 -- SCRIPT ARGS`")
    for flag, value in (("--machines", options.machines), ("--ranks-per-machine", options.ranks_per_machine)):
        if value < 1:
            raise UsageError(f"found {flag} {value}, expected at least 1; pass {flag} 1 or more")
    if not options.grace_period >= 0:
        raise UsageError(f"found --grace-period {options.grace_period}, expected seconds, 0 or more")
    if options.port is not None:
        if not 0 < options.port < 65536:
            raise UsageError(
                f"found --port {options.port}, expected 1 to 65535; leave it out to have a free one chosen"
            )
        if not _is_free(options.port, is_reuse_allowed=True):
            raise UsageError(
                f"found port {options.port} in use, expected a free one; pass another --port, or none for a free one"
            )
    if options.log_dir is not None:
        _check_writable(options.log_dir)
    check_resilience(options)


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        raise UsageError(
            f"found log directory {directory} not writable ({error.strerror}), expected one to write to;"
            " pass another --log-dir"
        ) from error


def _facts(script: Path) -> ScriptFacts:
    if not script.is_file():
        raise UsageError(f"found no file {script}, expected the training script; check the path after `--`")
    try:
        return read_script_facts(script)
    except (ValueError, OSError) as error:
        raise UsageError(f"found a script that can't be run, expected Python: {error}") from error


def _is_free(port: int, *, is_reuse_allowed: bool) -> bool:
    """Whether a server could listen on `port` on all addresses. With reuse, lingering old connections don't count."""
    has_both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if has_both else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(is_reuse_allowed))
        if has_both:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections, which could take it before rank 0 does."""
    chooser = random.SystemRandom()
    for _ in range(_TRIES_MAX):
        port = chooser.randrange(20000, 32000)
        if _is_free(port, is_reuse_allowed=False):
            return port
    raise UsageError(f"found no free port in {_TRIES_MAX} tries from 20000 to 31999; pass one with --port")


def _preflight(script: list[str], shape: JobShape) -> int:
    """Lets the script check its arguments, once, before any rank starts. Passes its words on; returns the exit code."""
    inherited = inherited_environment()
    environment = {
        **inherited,
        **default_environment(inherited, shape.master_addr),
        **rank_environment(shape, group_rank=0, local_rank=0),
    }
    # No loop watches for signals yet; Ctrl-C and this one leave through the clean-up below.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_FAILURE))
    process = subprocess.Popen(
        [sys.executable, script[0], *script[1:], "--preflight-only"],
        stdin=subprocess.DEVNULL,
        env=environment,
        preexec_fn=lambda: process_tree.set_parent_death_signal(signal.SIGKILL),
    )
    try:
        code = process.wait(timeout=_PREFLIGHT_S_MAX)
    except subprocess.TimeoutExpired:
        print(f"trainmover: error: the preflight of {script[0]} took over {_PREFLIGHT_S_MAX:.0f} s", file=sys.stderr)
        process.kill()
        code = EXIT_FAILURE
    finally:
        process_tree.end_processes(lambda: process_tree.descendants(process_tree.read_processes(), os.getpid()))
        process.wait()
        process_tree.reap_children()
    if code < 0:
        print(f"trainmover: error: the preflight of {script[0]} was killed by signal {-code}", file=sys.stderr)
        return EXIT_FAILURE
    return code if code in (EXIT_OK, EXIT_USAGE) else EXIT_FAILURE


def _make_log_dir(chosen: Path | None) -> Path:
    """The directory of this job's logs; a default one gets a `latest` link beside it."""
    if chosen is not None:
        return chosen
    _check_writable(_DEFAULT_LOG_ROOT)
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in range(_TRIES_MAX):
        directory = _DEFAULT_LOG_ROOT / (f"{name}-{number}" if number else name)
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            break
    else:
        raise UsageError(f"found {_TRIES_MAX} log directories like {directory}, expected a new one; pass --log-dir")
    link = _DEFAULT_LOG_ROOT / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(directory.name)
    link.replace(_DEFAULT_LOG_ROOT / "latest")
    return directory
