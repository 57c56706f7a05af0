"""Entry point of the `trainmover` command: finds the subcommand; a usage error becomes one line and exit code 2."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from megatron.resilience.agent.failure import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from megatron.resilience.cli.usage import UsageError, nearest

_COMMANDS = {
    "run": "megatron.resilience.cli.run",
    "status": "megatron.resilience.cli.status",
    "migrate": "megatron.resilience.cli.migrate",
    "incidents": "megatron.resilience.cli.incidents",
    "prove": "megatron.resilience.cli.prove",
    "controller": "megatron.resilience.controller.main",
    "agent": "megatron.resilience.agent.main",
}
"""Subcommand -> the module that is imported for it, and whose `main` runs it."""

_HELP = """usage: trainmover COMMAND ...

commands:
  run         start a training job of several machines on this computer
  status      show the machines of a running job, and what moves
  migrate     take a machine out of a running job and put another in
  incidents   list the interruptions of a job and what they cost
  prove       show on a job of your own that replacing machines changes no bit of it
  controller  control the membership of one job; `run --resilience` starts it
  agent       start and watch the ranks of one machine; `run --resilience` starts it

`trainmover COMMAND --help` tells more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: this process's own). Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP, file=sys.stdout if arguments else sys.stderr)
        return EXIT_OK if arguments else EXIT_USAGE
    try:
        command = _COMMANDS.get(arguments[0])
        if command is None:
            raise UsageError(
                f"found command {arguments[0]!r}, expected {' or '.join(_COMMANDS)}{nearest(arguments[0], _COMMANDS)}"
            )
        entry: Callable[[Sequence[str]], int] = importlib.import_module(command).main
        return entry(arguments[1:])
    except UsageError as error:
        print(f"trainmover: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
