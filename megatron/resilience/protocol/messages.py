"""Every message of the protocol in one table: who sends it to whom, and how it is written.

Controller and agents talk over one stream each, an agent and its ranks over a local socket, ranks among each other in
notes. A message for a rank travels as `ToRank` to its agent, one from a rank as `FromRank` from it; agents relay them
unread. Messages of the controller bear its term, and agents obey the highest. Shells call `encode` and `decode`.
"""

from __future__ import annotations

import enum
from typing import Any, get_args

import msgspec

from megatron.resilience.protocol.agent_messages import (
    AgentHello,
    Discard,
    FromRank,
    HeldRank,
    RankEnded,
    Rejected,
    Release,
    StartRanks,
    StartRefused,
    StopJob,
    Table,
    TableHeard,
    ToAgent,
    ToController,
    ToRank,
    Welcome,
)
from megatron.resilience.protocol.message import (
    Message,
    MessageError,
)
from megatron.resilience.protocol.rank_messages import (
    Abort,
    Armed,
    AtBoundary,
    Built,
    Cast,
    Directory,
    Go,
    InDoubt,
    LeaveJob,
    Left,
    Measured,
    MoreLinks,
    Note,
    NoteAcked,
    NoteFailed,
    NoteVerdict,
    Planned,
    PrepareJoiner,
    PrepareLeaver,
    PrepareStayer,
    Progress,
    Query,
    RankCommand,
    RankReport,
    Ready,
    Resolve,
    Running,
    Stayed,
    SwitchCommand,
    Unready,
    Withdraw,
    Withdrawn,
    WorkerHello,
)
from megatron.resilience.protocol.user_messages import (
    Accepted,
    AskIncidents,
    AskStatus,
    Finished,
    IncidentsAnswer,
    MachineView,
    Migrate,
    ProgressLine,
    Refused,
    StatusAnswer,
    UserAnswer,
    UserCommand,
)

__all__ = [
    "MESSAGE_BYTES_MAX",
    "ROUTES",
    "Abort",
    "Accepted",
    "AgentHello",
    "Armed",
    "AskIncidents",
    "AskStatus",
    "AtBoundary",
    "Built",
    "Cast",
    "Directory",
    "Discard",
    "Finished",
    "FromRank",
    "Go",
    "HeldRank",
    "InDoubt",
    "IncidentsAnswer",
    "LeaveJob",
    "Left",
    "MachineView",
    "Measured",
    "Message",
    "MessageError",
    "Migrate",
    "MoreLinks",
    "Note",
    "NoteAcked",
    "NoteFailed",
    "NoteVerdict",
    "Party",
    "Planned",
    "PrepareJoiner",
    "PrepareLeaver",
    "PrepareStayer",
    "Progress",
    "ProgressLine",
    "Query",
    "RankCommand",
    "RankEnded",
    "RankReport",
    "Ready",
    "Refused",
    "Rejected",
    "Release",
    "Resolve",
    "Running",
    "StartRanks",
    "StartRefused",
    "StatusAnswer",
    "Stayed",
    "StopJob",
    "SwitchCommand",
    "Table",
    "TableHeard",
    "ToAgent",
    "ToController",
    "ToRank",
    "Unready",
    "UserAnswer",
    "UserCommand",
    "Welcome",
    "Withdraw",
    "Withdrawn",
    "WorkerHello",
    "decode",
    "encode",
    "route_types",
]

MESSAGE_BYTES_MAX = 64 << 20
"""Of one encoded message: a table of 16,384 endpoints is about 1 MiB."""


class Party(enum.Enum):
    """Who talks."""

    CONTROLLER = "controller"
    AGENT = "agent"
    RANK = "rank"
    PEER = "another rank"
    USER = "user"


ROUTES: dict[tuple[Party, Party], Any] = {
    (Party.CONTROLLER, Party.AGENT): ToAgent,
    (Party.AGENT, Party.CONTROLLER): ToController,
    (Party.AGENT, Party.RANK): RankCommand,
    (Party.RANK, Party.AGENT): RankReport,
    (Party.RANK, Party.PEER): Note,
    (Party.USER, Party.CONTROLLER): UserCommand,
    (Party.CONTROLLER, Party.USER): UserAnswer,
}
"""Who may send what to whom."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {route: msgspec.msgpack.Decoder(union) for route, union in ROUTES.items()}


def route_types(route: tuple[Party, Party]) -> tuple[type[Message], ...]:
    """The messages of one route."""
    return get_args(ROUTES[route])


def encode(message: Message) -> bytes:
    """Bytes of `message`."""
    return _ENCODER.encode(message)


def decode(payload: bytes, *, sender: Party, receiver: Party) -> Any:
    """The message in `payload`. Raises MessageError for anything that `sender` may not send to `receiver`."""
    if len(payload) > MESSAGE_BYTES_MAX:
        raise MessageError(
            f"{sender.value} sent {len(payload)} bytes, expected at most {MESSAGE_BYTES_MAX}; dropping the connection"
        )
    try:
        return _DECODERS[sender, receiver].decode(payload)
    except msgspec.DecodeError as error:
        raise MessageError(
            f"{sender.value} sent {len(payload)} bytes that the {receiver.value} cannot read: {error}; "
            "expected a message of the table in docs/protocol.md; both sides must run the same version of trainmover"
        ) from error
