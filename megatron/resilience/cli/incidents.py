"""`trainmover incidents`: the interruptions of a job, oldest first, and what each cost."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec

from megatron.resilience.agent.failure import EXIT_FAILURE, EXIT_OK
from megatron.resilience.cli.migrate import bytes_text
from megatron.resilience.cli.user import find_client, find_directory, read_end, read_journal, user_parser
from megatron.resilience.controller.client import ClientError, ControllerClient
from megatron.resilience.controller.directory import ResilienceDirectory
from megatron.resilience.protocol.incidents import Incident, milliseconds
from megatron.resilience.protocol.journal import Ledger, incident_of
from megatron.resilience.protocol.messages import AskIncidents, IncidentsAnswer

TABLE_WIDTH = 160
"""Columns that a table needs; on a narrower terminal an incident has lines of its own."""
_PATIENCE_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Lists them. Returns the exit code; raises UsageError."""
    parser = user_parser("incidents", "Lists the interruptions of a job and what they cost.")
    parser.add_argument("--json", action="store_true", help="a JSON array")
    options = parser.parse_flags(list(argv))
    directory = find_directory(options)
    try:
        incidents = known_incidents(find_client(options), directory)
    except ClientError as error:
        print(f"trainmover: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    if options.json:
        print(json.dumps(msgspec.to_builtins(incidents)))
        return EXIT_OK
    from rich.console import Console

    console = Console(file=sys.stdout)
    if incidents and console.width < TABLE_WIDTH:
        print("\n".join(paragraphs(incidents, console.width)))
    else:
        console.print(table(incidents) if incidents else "no incidents")
    return EXIT_OK


def known_incidents(client: ControllerClient, directory: ResilienceDirectory | None) -> tuple[Incident, ...]:
    """From the controller; from its journal where that can be read, once the job is over or if nobody answers.

    Raises ClientError.
    """
    end = read_end(directory)
    if end is not None:
        return end.all_incidents()
    try:
        return ask_incidents(client)
    except ClientError as error:
        ledger = None if directory is None else read_journal(directory)
        if ledger is None:
            raise
        print(f"trainmover: from the journal, as the controller does not answer: {error}", file=sys.stderr)
        return (*ledger.all_incidents(), *_under_way(ledger))


def _under_way(ledger: Ledger) -> tuple[Incident, ...]:
    """What was prepared when the journal ends, as long as that had lasted by its last entry."""
    switch = ledger.switch
    if switch is None:
        return ()
    phase, since_ms = switch.marks[-1]
    boundary = ledger.boundaries.get(switch.generation, -1)
    return (incident_of(switch, outcome=phase, end_ms=since_ms, boundary=boundary),)


def ask_incidents(client: ControllerClient) -> tuple[Incident, ...]:
    """All so far. Raises ClientError."""
    for answer in client.ask(AskIncidents(), patience_s=_PATIENCE_S, answer_s=_PATIENCE_S, retry=lambda: None):
        if isinstance(answer, IncidentsAnswer):
            return answer.incidents
    raise ClientError("the controller gave no incidents")


COLUMNS = ("id", "kind", "outcome", "moves", "at iteration", "downtime", "lost", "links", "moved", "phases")


def cells(incident: Incident) -> tuple[str, ...]:
    """What a row says of an incident, in the order of COLUMNS."""
    moves = ", ".join(
        f"slot {slot}: {leaver} -> {joiner}"
        for slot, leaver, joiner in zip(incident.slots, incident.leavers, incident.joiners, strict=True)
    )
    outcome = incident.outcome + (f": {incident.why}" if incident.why else "")
    happened = incident.boundary >= 0 and incident.ranks_measured > 0
    return (
        incident.incident_id,
        incident.kind,
        outcome,
        moves,
        str(incident.boundary) if incident.boundary >= 0 else "-",
        milliseconds(incident.downtime_ms) if happened else "-",
        milliseconds(incident.lost_ms) if happened else "-",
        f"{incident.links_replaced} replaced, {incident.links_kept} kept" if happened else "-",
        bytes_text(incident.bytes_moved) if happened else "-",
        ", ".join(f"{phase.name} {phase.duration_ms:.0f} ms" for phase in incident.phases),
    )


def table(incidents: Sequence[Incident]) -> Any:
    """A rich table, a row an incident."""
    from rich.table import Table

    rows = Table(*COLUMNS)
    for incident in incidents:
        rows.add_row(*cells(incident))
    return rows


def paragraphs(incidents: Sequence[Incident], width: int) -> list[str]:
    """The same where a table would not fit: what and at which cost, what moved, the phases; each wrapped."""
    lines = []
    for incident in incidents:
        said = dict(zip(COLUMNS, cells(incident), strict=True))
        cost = [f"{name} {said[name]}" for name in ("at iteration", "downtime", "lost") if said[name] != "-"]
        moved = [f"{name} {said[name]}" for name in ("links", "moved") if said[name] != "-"]
        first = f"{said['id']} {said['kind']}: {', '.join([said['outcome'], *cost])}"
        lines += textwrap.wrap(first, width, subsequent_indent="  ")
        for line in (", ".join([said["moves"], *moved]), said["phases"]):
            lines += textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ")
    return lines
