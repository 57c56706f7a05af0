"""`trainmover agent`: runs the agent of one machine. Started by `trainmover run`, or by Slurm, once a machine.

The controller, the job's token, its name and this machine's are told by TRAINMOVER_CONTROLLER, TRAINMOVER_TOKEN,
TRAINMOVER_JOB and TRAINMOVER_MACHINE: a command line can be read by everybody on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.resilience.agent import process_tree
from megatron.resilience.agent.agent import Agent
from megatron.resilience.agent.agent_config import AgentConfig
from megatron.resilience.agent.controller_line import LineConfig
from megatron.resilience.agent.environment import (
    ControlSettings,
    JobShape,
    control_settings,
    default_environment,
    inherited_environment,
    install_environment,
)
from megatron.resilience.agent.lifecycle import Limits
from megatron.resilience.agent.machine_facts import kernel_bytes, machine_facts, steering_variables
from megatron.resilience.agent.rank_start import StartMode
from megatron.resilience.agent.spawner import split_at_script
from megatron.resilience.cli.tls_flags import add_tls_flags, tls_files
from megatron.resilience.cli.usage import FlagParser, UsageError
from megatron.resilience.controller.wire import TlsFiles
from megatron.resilience.protocol.agent_core import AgentCore
from megatron.resilience.protocol.facts import Capacity

_FIRST_CONTACT_S = 300.0
_ALONE_S = 600.0


def main(argv: Sequence[str]) -> int:
    """Runs it. Returns the exit code; raises UsageError."""
    own, script = split_at_script(argv)
    options = _parser().parse_flags(own)
    _check(options, script)
    install_environment(default_environment(inherited_environment(), options.master_addr))
    settings = control_settings(inherited_environment())
    _check_settings(settings)
    tls = tls_files(options)
    process_tree.become_subreaper()
    if options.report_fd is not None:
        os.set_inheritable(options.report_fd, False)
    if options.log_dir is not None:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    core = AgentCore(
        machine_id=settings.machine_id,
        incarnation=time.time_ns() // 1_000_000,
        job=settings.job,
        machines=options.machines,
        ranks_per_machine=options.ranks_per_machine,
        rack=options.rack,
        elastic=options.elastic,
        capacity=Capacity(
            ranks=options.capacity_ranks or options.ranks_per_machine,
            memory_bytes=options.capacity_bytes or kernel_bytes(_read("/proc/meminfo"), "MemTotal"),
        ),
        facts=machine_facts(
            cpu_capability=settings.cpu_capability,
            threads=settings.threads,
            cpu_text=_read("/proc/cpuinfo"),
            variables=steering_variables(inherited_environment()),
        ),
    )
    return asyncio.run(Agent(_config(options, script, settings, tls), core).run())


def _config(
    options: argparse.Namespace, script: list[str], settings: ControlSettings, tls: TlsFiles | None
) -> AgentConfig:
    return AgentConfig(
        shape=JobShape(
            machines=options.machines,
            ranks_per_machine=options.ranks_per_machine,
            master_addr=options.master_addr,
            master_port=options.master_port,
        ),
        script=script[0],
        arguments=tuple(script[1:]),
        start=StartMode(options.start),
        log_dir=options.log_dir,
        report_fd=options.report_fd,
        limits=Limits(grace_s=options.grace_period),
        line=LineConfig(where=settings.controller, token=settings.token, tls=tls),
        first_contact_s=options.first_contact,
        alone_s=options.without_controller,
    )


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="trainmover agent",
        usage="trainmover agent [flags] -- SCRIPT ARGS...",
        description="Starts and watches the ranks of one machine as the job's controller says.",
        allow_abbrev=False,
    )
    parser.add_argument("--machines", type=int, required=True, metavar="M", help="slots of the job")
    parser.add_argument("--ranks-per-machine", type=int, required=True, metavar="L")
    parser.add_argument("--master-addr", required=True, metavar="HOST", help="where rank 0 listens at first")
    parser.add_argument("--master-port", type=int, required=True, metavar="PORT")
    parser.add_argument("--elastic", action="store_true", help="hold no slot at first; wait to join")
    parser.add_argument("--rack", default="", metavar="NAME", help="a joiner is sought in the leaver's rack first")
    parser.add_argument("--capacity-ranks", type=int, default=0, metavar="N", help="ranks it can run (default L)")
    parser.add_argument("--capacity-bytes", type=int, default=0, metavar="N", help="its memory (default: all)")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep each rank's output in a file here")
    parser.add_argument("--start", choices=[mode.value for mode in StartMode], default=StartMode.FORK.value)
    parser.add_argument("--grace-period", type=float, default=Limits().grace_s, metavar="SECONDS")
    parser.add_argument("--first-contact", type=float, default=_FIRST_CONTACT_S, metavar="SECONDS")
    parser.add_argument(
        "--without-controller",
        type=float,
        default=_ALONE_S,
        metavar="SECONDS",
        help="how long an agent without ranks waits for a controller that has gone",
    )
    parser.add_argument("--report-fd", type=int, help="descriptor for events, one JSON object a line")
    add_tls_flags(parser)
    return parser


def _check(options: argparse.Namespace, script: list[str]) -> None:
    if not script:
        raise UsageError("found no script, expected one after `--`; run `trainmover agent [flags] -- SCRIPT ARGS`")
    for flag, value in (("--machines", options.machines), ("--ranks-per-machine", options.ranks_per_machine)):
        if value < 1:
            raise UsageError(f"found {flag} {value}, expected at least 1")


def _check_settings(settings: ControlSettings) -> None:
    needed = {
        "TRAINMOVER_CONTROLLER": (settings.controller, "host:port of the controller, or the resilience directory"),
        "TRAINMOVER_TOKEN": (settings.token, "the job's token, from its resilience directory"),
        "TRAINMOVER_JOB": (settings.job, "the job's name"),
        "TRAINMOVER_MACHINE": (settings.machine_id, "this machine's name, which no other has"),
    }
    for name, (value, what) in needed.items():
        if not value:
            raise UsageError(f"found no {name} in the environment, expected {what}; set it")


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as usage_error:
        print(f"trainmover: error: {usage_error}", file=sys.stderr)
        sys.exit(2)
