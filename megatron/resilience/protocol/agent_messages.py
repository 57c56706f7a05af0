"""What controller and agents say to each other. All that a controller says bears its term."""

from __future__ import annotations

import msgspec

from megatron.resilience.protocol.facts import Capacity, Facts
from megatron.resilience.protocol.message import Message
from megatron.resilience.protocol.rank_messages import Directory, RankCommand, RankReport

# ------------------------------------------------------------------ controller -> agent


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to AgentHello."""

    term: int
    job: str


class StartRanks(Message, frozen=True, kw_only=True):
    """Start the ranks of `slot`: of the whole job in generation 1, as joiners (alone, isolated) later. Idempotent."""

    term: int
    generation: int
    slot: int
    ranks: tuple[int, ...]
    endpoints: dict[int, str]
    """Of the others; empty in generation 1, where Table follows when all are known."""
    slot_generations: tuple[int, ...]


class ToRank(Message, frozen=True, kw_only=True):
    """To be relayed to the rank."""

    term: int
    global_rank: int
    command: RankCommand


class Table(Message, frozen=True, kw_only=True):
    """Directory for all ranks of the machine."""

    term: int
    directory: Directory


class Discard(Message, frozen=True, kw_only=True):
    """End the joiner ranks of `generation`: its switch is over. Nothing happens if there are none."""

    term: int
    generation: int
    why: str


class Release(Message, frozen=True, kw_only=True):
    """The slot has moved in `generation`: end the ranks that were started for it before."""

    term: int
    generation: int


class StopJob(Message, frozen=True, kw_only=True):
    """End all ranks: the job is over, well if `ok`."""

    term: int
    why: str
    ok: bool


class Rejected(Message, frozen=True, kw_only=True):
    """The agent may not attach: it ends if that is `final`, and asks again otherwise."""

    term: int
    why: str
    final: bool


# ------------------------------------------------------------------ agent -> controller


class HeldRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's process that runs on a machine."""

    global_rank: int
    slot: int
    generation: int
    """In which it was started."""


class AgentHello(Message, frozen=True, kw_only=True):
    """First word of each stream: who, of which job, and what runs there. The last hellos of its ranks follow."""

    machine_id: str
    incarnation: int
    job: str
    machines: int
    """Slots of the job, as the agent was told."""
    ranks_per_machine: int
    rack: str = ""
    elastic: bool = False
    """Asked for only when a migration starts; holds no slot at first."""
    capacity: Capacity
    facts: Facts
    term_seen: int = 0
    ranks: tuple[HeldRank, ...] = ()


class FromRank(Message, frozen=True, kw_only=True):
    """Relayed from the rank."""

    global_rank: int
    generation: int
    """In which the rank's process was started: tells a leaver's rank from a joiner's."""
    report: RankReport


class RankEnded(Message, frozen=True, kw_only=True):
    """A rank's process has ended."""

    global_rank: int
    generation: int
    exit_code: int
    expected: bool
    """It was told to: released, discarded or stopped."""
    why: str = ""


class StartRefused(Message, frozen=True, kw_only=True):
    """The agent cannot start the ranks it was asked for."""

    generation: int
    why: str


class TableHeard(Message, frozen=True, kw_only=True):
    """The table of these generations has gone to all ranks of the machine."""

    slot_generations: tuple[int, ...]


ToAgent = Welcome | StartRanks | ToRank | Table | Discard | Release | StopJob | Rejected
ToController = AgentHello | FromRank | RankEnded | StartRefused | TableHeard
