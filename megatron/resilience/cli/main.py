"""Entry point of the `trainmover` command: finds the subcommand; a usage error becomes one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.resilience.agent.failure import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from megatron.resilience.cli import run
from megatron.resilience.cli.usage import UsageError, nearest

_COMMANDS = {"run": run.main}

_HELP = """usage: trainmover COMMAND ...

commands:
  run    start a training job of several machines on this computer

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
        return command(arguments[1:])
    except UsageError as error:
        print(f"trainmover: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
