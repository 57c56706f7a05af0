"""`trainmover status`: the machines of a job, what holds which slot, and what moves."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from megatron.resilience.agent.failure import EXIT_FAILURE, EXIT_OK
from megatron.resilience.cli.user import describe_end, find_client, find_directory, read_end, user_parser
from megatron.resilience.controller.client import ClientError, ControllerClient
from megatron.resilience.controller.store import StoreError, read_job
from megatron.resilience.protocol.journal import Ledger
from megatron.resilience.protocol.messages import AskStatus, MachineView, StatusAnswer

_PATIENCE_S = 5.0
_WATCH_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Shows it. Returns the exit code; raises UsageError."""
    parser = user_parser("status", "Shows the machines of a running job, and what moves.")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one JSON object")
    output.add_argument("--watch", action="store_true", help="again every second, until the job is over")
    options = parser.parse_flags(list(argv))
    client, directory = find_client(options), find_directory(options)
    end = read_end(directory)
    try:
        if end is not None and directory is not None:
            status = status_at_end(end, read_job(directory.journal))
        elif options.watch:
            return _watch(client)
        else:
            status = ask_status(client)
    except (ClientError, StoreError) as error:
        print(f"trainmover: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    if options.json:
        print(json.dumps(as_json(status)))
    else:
        _console().print(table(status))
    return EXIT_OK


def ask_status(client: ControllerClient) -> StatusAnswer:
    """The status now. Raises ClientError."""
    for answer in client.ask(AskStatus(), patience_s=_PATIENCE_S, answer_s=_PATIENCE_S, retry=lambda: None):
        if isinstance(answer, StatusAnswer):
            return answer
    raise ClientError("the controller gave no status")


def status_at_end(ledger: Ledger, job: str) -> StatusAnswer:
    """Of a job that is over, from its journal: who held the slots at last."""
    held = enumerate(zip(ledger.table, ledger.slot_generations, ledger.incarnations, strict=True))
    return StatusAnswer(
        job=job,
        state="ended" if ledger.ended_ok else "failed",
        why=describe_end(ledger),
        term=0,
        generation=ledger.generation,
        iteration=0,
        median_iteration_ms=0.0,
        machines=tuple(
            MachineView(
                machine_id=machine_id,
                incarnation=incarnation,
                rack="",
                attached=False,
                slot=slot,
                generation=generation,
                state="ended",
            )
            for slot, (machine_id, generation, incarnation) in held
        ),
        switch="",
        queued=(),
    )


def as_json(status: StatusAnswer) -> dict[str, Any]:
    """Plain values, without the wire's own fields."""
    plain: dict[str, Any] = msgspec.to_builtins(status)
    plain.pop("message")
    return plain


def table(status: StatusAnswer) -> Any:
    """A rich table under its headline."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    pace = f", iteration {status.iteration}, {status.median_iteration_ms:.0f} ms each" if status.iteration else ""
    term = f", controller's term {status.term}" if status.term else ""
    lines = [f"job {status.job}: {status.state}{pace}; generation {status.generation}{term}"]
    if status.why:
        lines.append(status.why)
    if status.switch:
        lines.append(f"a switch is under way: {status.switch}")
    if status.queued:
        lines.append(f"{len(status.queued)} further migrations wait")
    machines = Table("machine", "slot", "since generation", "state", "agent", "rack")
    for machine in status.machines:
        holds = machine.slot is not None
        machines.add_row(
            machine.machine_id,
            str(machine.slot) if holds else "-",
            str(machine.generation) if holds else "-",
            machine.state,
            "connected" if machine.attached else "away",
            machine.rack or "-",
        )
    return Group(*(Text(line) for line in lines), machines)


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stdout)


def _watch(client: ControllerClient) -> int:
    """A live table on a terminal; elsewhere a table whenever something has changed."""
    from rich.live import Live

    console, status = _console(), ask_status(client)
    if not console.is_terminal:
        return _follow(client, console, status)
    with Live(table(status), console=console, auto_refresh=False) as live:
        while (following := _next(client, status)) is not None:
            status = following
            live.update(table(status), refresh=True)
    return EXIT_OK


def _follow(client: ControllerClient, console: Any, status: StatusAnswer) -> int:
    shown: StatusAnswer | None = None
    following: StatusAnswer | None = status
    while following is not None:
        still = msgspec.structs.replace(following, iteration=0, median_iteration_ms=0.0)
        if still != shown:
            console.print(table(following))
            sys.stdout.flush()
        shown = still
        following = _next(client, following)
    return EXIT_OK


def _next(client: ControllerClient, status: StatusAnswer) -> StatusAnswer | None:
    """The status a second later; None when the job is over, and its controller with it."""
    if status.state in ("ended", "failed"):
        return None
    time.sleep(_WATCH_S)
    try:
        return ask_status(client)
    except ClientError as error:
        print(f"trainmover: the controller has gone: {error}", file=sys.stderr)
        return None
