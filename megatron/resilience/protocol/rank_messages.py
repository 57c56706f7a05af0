"""What ranks hear and say: commands of the controller, their reports, and notes among each other.

Commands and reports travel by way of the agent (`ToRank`, `FromRank` in agent_messages.py), notes from rank to rank.
"""

from __future__ import annotations

import msgspec

from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.memory import Peak, Room
from megatron.resilience.protocol.message import Message

# ------------------------------------------------------------------ controller -> rank, relayed by its agent


class PrepareLeaver(Message, frozen=True, kw_only=True):
    """Listen for the transfer of `generation`, and say which ranks you have live links to."""

    generation: int
    leavers: tuple[int, ...]
    """All global ranks that leave in this switch."""
    lead: int
    """The one of them that casts and decides."""
    since_ms: float = 0.0
    """How long ago the switch began."""


class PrepareStayer(Message, frozen=True, kw_only=True):
    """Build a link beside each live one to a rank that leaves; wait for the verdicts of the `linked` leaver ranks."""

    generation: int
    joiners: dict[int, str]
    """All of the switch, the same each time: leaver's global rank -> endpoint of the joiner."""
    linked: tuple[int, ...]
    """Those of them that named this rank as linked; more may follow."""
    since_ms: float = 0.0
    """How long ago the switch began."""


class PrepareJoiner(Message, frozen=True, kw_only=True):
    """Where the leaver of the same global rank will give its state, and where all ranks that join listen."""

    generation: int
    transfer: str
    joiners: dict[int, str]


class Planned(Message, frozen=True, kw_only=True):
    """To a leaver rank: these stayers are prepared too, and wait for your verdict."""

    generation: int
    stayers: tuple[int, ...]


class Go(Message, frozen=True, kw_only=True):
    """To the lead alone: all are READY, cast `generation` at your next vote."""

    generation: int


class Withdraw(Message, frozen=True, kw_only=True):
    """To the lead: do not cast `generation`. Answered with Withdrawn, Cast, Left or Stayed."""

    generation: int


class Abort(Message, frozen=True, kw_only=True):
    """Drop whatever was prepared for `generation` and older ones. Idempotent."""

    generation: int
    why: str


class Query(Message, frozen=True, kw_only=True):
    """Say again where you stand in `generation`."""

    generation: int


class Resolve(Message, frozen=True, kw_only=True):
    """To a joiner rank in doubt: the lead's verdict was LEAVE."""

    generation: int


class Directory(Message, frozen=True, kw_only=True):
    """Where ranks listen, and in which generation each slot last changed hands. Whole, not a difference."""

    endpoints: dict[int, str]
    slot_generations: tuple[int, ...]


class LeaveJob(Message, frozen=True, kw_only=True):
    """To a rank whose slot has moved: end, with exit code 0."""

    generation: int


SwitchCommand = PrepareLeaver | PrepareStayer | PrepareJoiner | Planned | Go | Withdraw | Abort | Query | Resolve
RankCommand = SwitchCommand | Directory | LeaveJob

# ------------------------------------------------------------------ rank -> controller, relayed by its agent


class WorkerHello(Message, frozen=True, kw_only=True):
    """First word of a rank's process: it listens at `endpoint` (text of host, port and identity)."""

    generation: int
    """In which it was started."""
    endpoint: str
    facts: Facts


class Built(Message, frozen=True, kw_only=True):
    """Model, groups and optimizer are built (alone, if it is a joiner)."""

    generation: int
    endpoint: str
    facts: Facts
    memory_bytes: int
    """What its tensors and links have as built: the least that a machine must have."""
    room: Room = Room()
    """Joiner: what it holds, and what is left there."""


class Ready(Message, frozen=True, kw_only=True):
    """All that was asked for `generation` is prepared."""

    generation: int
    linked: tuple[int, ...] = ()
    """Leaver: global ranks it has live links to. Stayer: leaver ranks it is prepared for."""
    transfer: str = ""
    """Leaver: where it will give its state."""
    peak: Peak = Peak()
    """Leaver: what it has needed so far."""


class Unready(Message, frozen=True, kw_only=True):
    """Something of `generation` broke, or could not be prepared."""

    generation: int
    why: str


class MoreLinks(Message, frozen=True, kw_only=True):
    """Leaver: links have come up since READY; it vetoes until Planned covers them."""

    generation: int
    linked: tuple[int, ...]


class Withdrawn(Message, frozen=True, kw_only=True):
    """Lead: `generation` was not cast and never will be."""

    generation: int


class Cast(Message, frozen=True, kw_only=True):
    """Lead: `generation` has been granted; the switch is at the top of iteration `boundary`. Left or Stayed follows."""

    generation: int
    boundary: int


class AtBoundary(Message, frozen=True, kw_only=True):
    """Lead: it stands at the boundary and gives its state: training has stopped for the switch."""

    generation: int


class Armed(Message, frozen=True, kw_only=True):
    """Lead: GO has come, and will be cast at the next vote."""

    generation: int


class Left(Message, frozen=True, kw_only=True):
    """Any leaver rank: all joiner ranks hold whole state, the verdict is LEAVE. The point of no return has passed."""

    generation: int
    boundary: int
    peak_bytes: int = 0
    """The most memory that this process has held."""


class Stayed(Message, frozen=True, kw_only=True):
    """Lead: the verdict is STAY; all go on as before."""

    generation: int
    why: str
    lacking: tuple[int, ...] = ()
    """Leaver ranks whose joiners did not take their state."""


class InDoubt(Message, frozen=True, kw_only=True):
    """Joiner: it holds whole state and has lost its leaver without a verdict."""

    generation: int


class Running(Message, frozen=True, kw_only=True):
    """Joiner: its first vote has passed, at `iteration`."""

    generation: int
    iteration: int


class Progress(Message, frozen=True, kw_only=True):
    """Any rank, now and then, for the status: the iteration it is in and its median over the last 20."""

    iteration: int
    median_iteration_ms: float


class Measured(Message, frozen=True, kw_only=True):
    """Any rank, after a switch, what it cost there. Milliseconds and bytes; links are counted on this rank."""

    generation: int
    boundary: int
    downtime_ms: float | None = None
    """None, as `lost_ms`: no iteration before the switch is known, to compare with."""
    lost_ms: float | None = None
    median_iteration_ms: float
    links_kept: int = 0
    links_replaced: int = 0
    bytes_moved: int = 0
    memory_before_bytes: int = 0
    """Of tensors and links at the top of an iteration, before anything was prepared; 0: was not there."""
    memory_after_bytes: int = 0
    """The same one iteration after the switch."""
    peak_bytes: int = 0
    """The most memory that this process has held."""
    phases: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    """Name -> (start after the boundary, duration), in ms."""


RankReport = (
    WorkerHello
    | Built
    | Ready
    | Unready
    | MoreLinks
    | Withdrawn
    | Cast
    | Armed
    | AtBoundary
    | Left
    | Stayed
    | InDoubt
    | Running
    | Progress
    | Measured
)

# ------------------------------------------------------------------ rank <-> rank


class NoteAcked(Message, frozen=True, kw_only=True):
    """Leaver rank to the lead: my joiner rank has acknowledged the checksum of all of my state."""

    generation: int


class NoteFailed(Message, frozen=True, kw_only=True):
    """Leaver rank to the lead: my transfer cannot be completed."""

    generation: int
    why: str


class NoteVerdict(Message, frozen=True, kw_only=True):
    """Lead to leaver ranks, leaver rank to linked stayers, and to its joiner rank: there the transfer's last frame."""

    generation: int
    leave: bool


Note = NoteAcked | NoteFailed | NoteVerdict
