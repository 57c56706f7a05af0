"""Which links a switch touches: per communicator and rank, the links kept, dropped and added. Pure.

What a switch comes to, worked out from the links alone: nothing executes it. The data plane finds the same, link by
link (`prepare_switch`, `commit_switch`). A rank without a link to a rank that moves has an empty plan, and finding that
out costs it nothing: `plans` never looks at it. (Paper section 5, delta set-up.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Link = tuple[str, int, int]
"""A used link: (communicator, one global rank, the other)."""


class PlanError(ValueError):
    """Links or ranks that cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorDelta:
    """What changes in one communicator of one rank: global ranks of peers, in order.

    A stayer's link to a peer that moves is dropped and added anew, to the same rank on another machine. A joiner adds
    all links of its rank. A link between two stayers is kept.
    """

    kept: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    added: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDelta:
    """What a switch asks of one rank: communicator -> delta. Empty for ranks far away."""

    communicators: Mapping[str, CommunicatorDelta]

    @property
    def is_empty(self) -> bool:
        """Nothing to do."""
        return not self.communicators

    @property
    def replaced(self) -> int:
        """Number of links that are built anew."""
        return sum(len(delta.added) for delta in self.communicators.values())

    @property
    def peers(self) -> tuple[int, ...]:
        """Global ranks on the other side of links that are built anew."""
        return tuple(sorted({peer for delta in self.communicators.values() for peer in delta.added}))


EMPTY = RankDelta(communicators={})


def stayer_delta(global_rank: int, links: Iterable[Link], moving: frozenset[int]) -> RankDelta:
    """The plan of a stayer from the links that it uses itself. Communicators without a moving peer are left out."""
    if global_rank in moving:
        raise PlanError(f"global rank {global_rank} moves: a leaver drops all, its joiner adds all")
    peers: dict[str, set[int]] = {}
    for communicator, a, b in links:
        if global_rank not in (a, b) or a == b:
            raise PlanError(f"found link {a}-{b} in {communicator}, expected one of global rank {global_rank}")
        peers.setdefault(communicator, set()).add(b if a == global_rank else a)
    deltas = {}
    for communicator, others in sorted(peers.items()):
        replaced = tuple(sorted(others & moving))
        if replaced:
            deltas[communicator] = CommunicatorDelta(
                kept=tuple(sorted(others - moving)), dropped=replaced, added=replaced
            )
    return RankDelta(communicators=deltas) if deltas else EMPTY


def joiner_delta(global_rank: int, links: Iterable[Link]) -> RankDelta:
    """The plan of a joiner: every link that its leaver uses, built anew."""
    peers: dict[str, set[int]] = {}
    for communicator, a, b in links:
        if global_rank not in (a, b) or a == b:
            raise PlanError(f"found link {a}-{b} in {communicator}, expected one of global rank {global_rank}")
        peers.setdefault(communicator, set()).add(b if a == global_rank else a)
    return RankDelta(
        communicators={name: CommunicatorDelta(added=tuple(sorted(others))) for name, others in sorted(peers.items())}
    )


def plans(links: Iterable[Link], moving: frozenset[int]) -> dict[int, RankDelta]:
    """Plans of all ranks that have one, from all used links of a job: joiners and linked stayers. Others are EMPTY.

    One pass over the links; ranks far away get no entry.
    """
    near: dict[int, list[Link]] = {}
    all_links = list(links)
    touched = {rank for _, a, b in all_links if a in moving or b in moving for rank in (a, b)}
    for link in all_links:
        for rank in {link[1], link[2]} & touched:
            near.setdefault(rank, []).append(link)
    return {
        rank: joiner_delta(rank, own) if rank in moving else stayer_delta(rank, own, moving)
        for rank, own in sorted(near.items())
    }


def linked_stayers(links: Iterable[Link], moving: frozenset[int]) -> frozenset[int]:
    """Stayers that hear of a switch before it is over."""
    return frozenset(
        rank for _, a, b in links if (a in moving) != (b in moving) for rank in (a, b) if rank not in moving
    )
