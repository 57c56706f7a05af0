"""Whether what the runs of a proof left behind can prove anything: equality of nothing is no proof. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.resilience.proof.compare import Record
from megatron.resilience.proof.schedule import Move


def gap_in_records(records: Sequence[Record], world_size: int) -> str:
    """What a run should have recorded and has not, in words; empty if nothing."""
    if not any(record["kind"] == "step" for record in records):
        return "found no step in the metrics, expected one an iteration; does the script write --metrics-file?"
    states = [record for record in records if record["kind"] == "state"]
    if len(states) != 1:
        return (
            f"found {len(states)} records of the final state, expected one; does the script end with "
            "--log-state-digest, and does nobody else write into its metrics?"
        )
    for name in ("sha256", "small_sha256"):
        digests = states[0].get(name)
        if not isinstance(digests, list) or len(digests) != world_size or not all(digests):
            return f"found the final state ({name}) {digests!r}, expected a digest of each of {world_size} ranks"
    return ""


def last_try(told: Sequence[dict[str, Any]], known: int) -> list[dict[str, Any]]:
    """The last of the incidents that came after the first `known`: a command tries one machine after another."""
    return list(told[known:][-1:])


def gap_in_migrations(records: Sequence[Record], moves: Sequence[Move], incidents: Sequence[Mapping[str, Any]]) -> str:
    """Which of `moves` was not made, or not between two recorded iterations, in words; empty if none.

    `incidents`: the last one of each move, in their order.
    """
    if len(incidents) != len(moves):
        return f"found {len(incidents)} migrations, expected {len(moves)}"
    steps = {record["iteration"] for record in records if record["kind"] == "step"}
    for move, incident in zip(moves, incidents, strict=True):
        if incident["outcome"] != "done":
            return f"a migration was not done: {incident['outcome']}: {incident['why']}"
        if sorted(incident["slots"]) != sorted(move.slots):
            return f"found slots {sorted(incident['slots'])} moved, expected {sorted(move.slots)}"
        boundary = incident["boundary"]
        for iteration in (boundary - 1, boundary):
            if iteration not in steps:
                return (
                    f"found no step of iteration {iteration} in the metrics, expected one on each side of the switch "
                    f"at the top of iteration {boundary}"
                )
    return ""
