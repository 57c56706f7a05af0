"""`trainmover migrate`: takes machines out of a running job and puts others in; tells how it goes and what it cost."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence

from megatron.resilience.agent.failure import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK
from megatron.resilience.cli.user import describe_end, find_client, find_directory, read_end, user_parser
from megatron.resilience.controller.client import ClientError
from megatron.resilience.protocol.incidents import Incident
from megatron.resilience.protocol.messages import Accepted, Finished, Migrate, ProgressLine, Refused

_PATIENCE_S = 60.0


def main(argv: Sequence[str]) -> int:
    """Migrates. Returns 0 if the machines were replaced, 1 if that was refused or aborted; raises UsageError."""
    parser = user_parser("migrate", "Takes machines out of a running job and puts others in. Training goes on.")
    parser.add_argument("--from", dest="leavers", action="append", required=True, metavar="MACHINE", help="to leave")
    parser.add_argument("--to", action="append", default=[], metavar="MACHINE", help="to join (default: chosen)")
    options = parser.parse_flags(list(argv))
    client, directory = find_client(options), find_directory(options)
    end = read_end(directory)
    if end is not None:
        print(f"trainmover: refused: {describe_end(end)}", file=sys.stderr)
        return EXIT_FAILURE
    command = Migrate(command_id=secrets.token_hex(8), leavers=tuple(options.leavers), to=tuple(options.to))
    told: set[str] = set()

    def retry() -> None:
        end = read_end(directory)
        if end is not None:
            raise ClientError(describe_end(end))
        if "retry" not in told:
            told.add("retry")
            _say("the controller does not answer; asking again")

    try:
        for answer in client.ask(command, patience_s=_PATIENCE_S, retry=retry):
            match answer:
                case Accepted(text=text) | ProgressLine(text=text):
                    told.discard("retry")
                    _say(text)
                case Refused(why=why):
                    print(f"trainmover: refused: {why}", file=sys.stderr)
                    return EXIT_FAILURE
                case Finished():
                    return _finish(answer)
    except KeyboardInterrupt:
        print(
            "trainmover: waits no longer; once it was accepted the migration goes on; see `trainmover status`, and "
            "`trainmover incidents` when it is over",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED
    except ClientError as error:
        print(f"trainmover: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    print(
        "trainmover: error: the controller ended the call without an answer; see `trainmover status`", file=sys.stderr
    )
    return EXIT_FAILURE


def _say(text: str) -> None:
    print(f"trainmover: {text}", flush=True)


def _finish(finished: Finished) -> int:
    if not finished.ok:
        print(f"trainmover: aborted: {finished.text}", file=sys.stderr)
        return EXIT_FAILURE
    parts = "" if finished.incident is None else describe_parts(finished.incident)
    _say(finished.text + parts)
    return EXIT_OK


def describe_parts(incident: Incident) -> str:
    """` (start joiner 812 ms overlapped, hand over 120 ms, first iteration 310 ms; 12 links replaced, 4 MB moved)`."""
    phases = [f"{phase.name} {phase.duration_ms:.0f} ms{' overlapped' * phase.overlapped}" for phase in incident.phases]
    links = f"{incident.links_replaced} links replaced, {incident.links_kept} kept"
    return f" ({', '.join(phases)}; {links}, {bytes_text(incident.bytes_moved)} moved)"


def bytes_text(number: int) -> str:
    """`4.2 MB`."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
