"""What must hold at every moment of every run, as pure checks. The simulator calls them after every step.

They are of `docs/protocol.md`: one holder a slot and generation; one boundary for all; no message across generations;
no generation twice; LEAVE only when every joiner rank has whole state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.resilience.protocol.journal import AnyEntry, SwitchBegun


class InvariantViolation(Exception):  # noqa: N818 - a defect of ours, named for what happened
    """Something that must never be was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Voter:
    """Who contributed to one vote for one global rank."""

    iteration: int
    global_rank: int
    machine_id: str
    generation: int
    """In which its slot last changed hands, as it knows itself."""


def check_one_holder(
    voter: Voter, voters: Mapping[tuple[int, int], Voter], holders: dict[tuple[int, int], str]
) -> None:
    """A rank runs an iteration once, and in one generation on one machine.

    `voters`: (iteration, global rank) -> who voted already; `holders`: (global rank, generation) -> machine, kept here.
    """
    before = voters.get((voter.iteration, voter.global_rank))
    if before is not None:
        raise InvariantViolation(f"two processes run one rank in one iteration: {before} and {voter}")
    machine_id = holders.setdefault((voter.global_rank, voter.generation), voter.machine_id)
    if machine_id != voter.machine_id:
        raise InvariantViolation(f"found {voter}, but {machine_id} holds that rank in that generation")


def check_one_boundary(generation: int, global_rank: int, boundary: int, boundaries: dict[int, int]) -> None:
    """Every rank that takes part in a switch takes part at the same iteration. `boundaries` is kept here."""
    agreed = boundaries.setdefault(generation, boundary)
    if agreed != boundary:
        raise InvariantViolation(
            f"global rank {global_rank} switches generation {generation} at iteration {boundary}, others at {agreed}"
        )


def check_same_verdict(generation: int, global_rank: int, leave: bool, verdicts: dict[int, bool]) -> None:
    """All hear one verdict. `verdicts` is kept here."""
    agreed = verdicts.setdefault(generation, leave)
    if agreed is not leave:
        raise InvariantViolation(
            f"global rank {global_rank}: LEAVE={leave} in generation {generation}, others {agreed}"
        )


def check_link(a: Voter, b: Voter, a_knows: int, b_knows: int) -> None:
    """Two linked ranks run an iteration with each other's present generation.

    `a_knows`: generation of `b`'s slot as `a`'s link has it; `b_knows` the other way.
    """
    if (a_knows, b_knows) != (b.generation, a.generation):
        raise InvariantViolation(
            f"iteration {a.iteration}: the link of global ranks {a.global_rank} and {b.global_rank} is of generations "
            f"{(b_knows, a_knows)}, they are in {(a.generation, b.generation)}: a message would cross generations"
        )


def check_fresh(entries: Iterable[AnyEntry]) -> None:
    """No generation is used twice, not even after an abort or a restart (rule P1)."""
    newest = 1
    for entry in entries:
        if isinstance(entry, SwitchBegun):
            if entry.generation <= newest:
                raise InvariantViolation(f"generation {entry.generation} is used again, after {newest}")
            newest = entry.generation


def check_whole(generation: int, leavers: Iterable[int], whole: Iterable[int]) -> None:
    """At the moment of LEAVE every joiner rank has whole state (rule P6)."""
    lacking = sorted(set(leavers) - set(whole))
    if lacking:
        raise InvariantViolation(f"LEAVE in generation {generation}, but joiner ranks {lacking} have no whole state")
