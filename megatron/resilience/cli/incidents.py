"""`trainmover incidents`: the interruptions of a job, oldest first, and what each cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from megatron.resilience.agent.failure import EXIT_FAILURE, EXIT_OK
from megatron.resilience.cli.migrate import bytes_text
from megatron.resilience.cli.user import find_client, find_directory, user_parser
from megatron.resilience.controller.client import ClientError, ControllerClient
from megatron.resilience.controller.directory import ResilienceDirectory
from megatron.resilience.controller.store import StoreError, read_entries
from megatron.resilience.protocol.incidents import Incident, milliseconds
from megatron.resilience.protocol.journal import JournalError, Ledger, decode_entry
from megatron.resilience.protocol.messages import AskIncidents, IncidentsAnswer

_PATIENCE_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Lists them. Returns the exit code; raises UsageError."""
    parser = user_parser("incidents", "Lists the interruptions of a job and what they cost.")
    parser.add_argument("--json", action="store_true", help="a JSON array")
    options = parser.parse_flags(list(argv))
    directory = find_directory(options)
    try:
        incidents = known_incidents(find_client(options), directory)
    except (ClientError, StoreError, JournalError) as error:
        print(f"trainmover: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    if options.json:
        print(json.dumps(msgspec.to_builtins(incidents)))
        return EXIT_OK
    from rich.console import Console

    Console(file=sys.stdout).print(table(incidents) if incidents else "no incidents")
    return EXIT_OK


def known_incidents(client: ControllerClient, directory: ResilienceDirectory | None) -> tuple[Incident, ...]:
    """From the controller or, once the job is over and it has gone, from its journal.

    Raises ClientError, StoreError, JournalError.
    """
    if directory is not None and directory.journal.exists():
        ledger = Ledger()
        for entry in read_entries(directory.journal):
            ledger.apply(decode_entry(entry))
        if ledger.ended:
            return ledger.all_incidents()
    return ask_incidents(client)


def ask_incidents(client: ControllerClient) -> tuple[Incident, ...]:
    """All so far. Raises ClientError."""
    for answer in client.ask(AskIncidents(), patience_s=_PATIENCE_S, retry=lambda: None):
        if isinstance(answer, IncidentsAnswer):
            return answer.incidents
    raise ClientError("the controller gave no incidents")


def table(incidents: Sequence[Incident]) -> Any:
    """A rich table, a row an incident."""
    from rich.table import Table

    rows = Table("id", "kind", "outcome", "moves", "at iteration", "downtime", "lost", "links", "moved", "phases")
    for incident in incidents:
        moves = ", ".join(
            f"slot {slot}: {leaver} -> {joiner}"
            for slot, leaver, joiner in zip(incident.slots, incident.leavers, incident.joiners, strict=True)
        )
        outcome = incident.outcome + (f": {incident.why}" if incident.why else "")
        happened = incident.boundary >= 0 and incident.ranks_measured > 0
        rows.add_row(
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
    return rows
