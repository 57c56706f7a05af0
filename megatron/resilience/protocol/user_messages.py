"""What users ask of the controller, and its answers."""

from __future__ import annotations

import msgspec

from megatron.resilience.protocol.incidents import Incident
from megatron.resilience.protocol.message import Message


class Migrate(Message, frozen=True, kw_only=True):
    """Take `leavers` (machine ids) out of the job; `to` names joiners in the same order, or is empty."""

    command_id: str
    """Made by the sender: the same id twice is one command."""
    leavers: tuple[str, ...]
    to: tuple[str, ...] = ()


class AskStatus(Message, frozen=True, kw_only=True):
    """`trainmover status`."""


class AskIncidents(Message, frozen=True, kw_only=True):
    """`trainmover incidents`."""


class Accepted(Message, frozen=True, kw_only=True):
    """The migration has begun, or waits for its turn."""

    command_id: str
    text: str


class Refused(Message, frozen=True, kw_only=True):
    """It never began; the job is undisturbed."""

    command_id: str
    why: str


class ProgressLine(Message, frozen=True, kw_only=True):
    """For the waiting user."""

    command_id: str
    text: str


class Finished(Message, frozen=True, kw_only=True):
    """It is over."""

    command_id: str
    ok: bool
    text: str
    incident: Incident | None = None


class MachineView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the status."""

    machine_id: str
    incarnation: int
    rack: str
    attached: bool
    slot: int | None
    generation: int
    state: str


class StatusAnswer(Message, frozen=True, kw_only=True):
    """All a status shows."""

    job: str
    state: str
    why: str
    term: int
    generation: int
    iteration: int
    median_iteration_ms: float
    machines: tuple[MachineView, ...]
    switch: str
    """Phase of the switch under way, or for whom it or the next one waits; empty if there is none."""
    queued: tuple[str, ...]


class IncidentsAnswer(Message, frozen=True, kw_only=True):
    """All incidents of the job, oldest first."""

    incidents: tuple[Incident, ...]


UserCommand = Migrate | AskStatus | AskIncidents
UserAnswer = Accepted | Refused | ProgressLine | Finished | StatusAnswer | IncidentsAnswer
