"""Where ranks sit: slots, global ranks, and every group of megatron-core as lists of global ranks.

The order is megatron-core's "tp-cp-ep-dp-pp" (`RankGenerator` in its parallel_state.py; tests compare the two).
Global rank = slot * ranks a machine + local rank. Pure. A running job needs slots alone (`Desk.ranks_of`), not groups.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

ORDER = ("tp", "cp", "ep", "dp", "pp")
"""From the fastest to the slowest changing coordinate."""

Ranks = tuple[int, ...]


class LayoutError(ValueError):
    """Sizes that do not fit each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of a job. `ep` and `etp` lay out experts, over the same ranks and pipeline stages."""

    world_size: int
    ranks_per_machine: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor parallelism of experts; None takes `tp`."""

    def __post_init__(self) -> None:
        for name, size in (("tp x pp x cp", self.tp * self.pp * self.cp), ("experts", self._expert_size)):
            if size < 1 or self.world_size < 1 or self.world_size % size:
                raise LayoutError(f"found {self.world_size} ranks, expected a multiple of {size} ({name})")
        if self.ranks_per_machine < 1 or self.world_size % self.ranks_per_machine:
            raise LayoutError(
                f"found {self.world_size} ranks, expected a multiple of {self.ranks_per_machine} a machine"
            )

    @property
    def _expert_size(self) -> int:
        return self.expert_tp * self.ep * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Data parallelism."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Data parallelism of experts."""
        return self.world_size // self._expert_size

    @property
    def slots(self) -> int:
        """Number of machines that the job holds."""
        return self.world_size // self.ranks_per_machine

    def slot_of(self, global_rank: int) -> int:
        """The slot that a rank belongs to."""
        if not 0 <= global_rank < self.world_size:
            raise LayoutError(f"found global rank {global_rank}, expected 0 to {self.world_size - 1}")
        return global_rank // self.ranks_per_machine

    def ranks_of(self, slot: int) -> Ranks:
        """The global ranks of a slot."""
        return slot_ranks(slot, self.ranks_per_machine)


def slot_ranks(slot: int, ranks_per_machine: int) -> Ranks:
    """The global ranks of a slot."""
    return tuple(range(slot * ranks_per_machine, (slot + 1) * ranks_per_machine))


def role_of(layout: Layout, global_rank: int) -> str:
    """`only`, `first`, `middle` or `last` stage of the pipeline."""
    stage = global_rank // (layout.world_size // layout.pp)
    if layout.pp == 1:
        return "only"
    return "first" if stage == 0 else "last" if stage == layout.pp - 1 else "middle"


def orthogonal_groups(sizes: dict[str, int], together: tuple[str, ...]) -> tuple[Ranks, ...]:
    """Ranks that differ in the coordinates `together` alone, one list for each value of the others.

    `sizes` are in order of `ORDER`, fastest first, as are groups and the ranks within them.
    """
    strides, stride = {}, 1
    for name, size in sizes.items():
        strides[name] = stride
        stride *= size

    def offsets(names: list[str]) -> list[int]:
        # The last factor of a product changes fastest, so the coordinates go in from the slowest.
        ranges = [range(0, sizes[name] * strides[name], strides[name]) for name in reversed(names)]
        return [sum(parts) for parts in itertools.product(*ranges)]

    inside = offsets([name for name in sizes if name in together])
    outside = offsets([name for name in sizes if name not in together])
    return tuple(tuple(start + offset for offset in inside) for start in outside)


_DECODER = {
    "tp": ("tp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "cp": ("cp",),
    "mp": ("tp", "pp"),
    "tp_dp": ("tp", "dp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "tp_cp": ("tp", "cp"),
}
_EXPERT = {
    "ep": ("ep",),
    "expt_tp": ("tp",),
    "tp_ep": ("tp", "ep"),
    "tp_ep_pp": ("tp", "ep", "pp"),
    "expt_dp": ("dp",),
}


def groups(layout: Layout) -> dict[str, tuple[Ranks, ...]]:
    """Every group of a job, by the name of its attribute in megatron-core's `ProcessGroupCollection`.

    `world` beside them; `embd` and `pos_embd` are the stages that hold embeddings; `intra_dist_opt` is one instance.
    """
    decoder = {"tp": layout.tp, "cp": layout.cp, "ep": 1, "dp": layout.dp, "pp": layout.pp}
    expert = {"tp": layout.expert_tp, "cp": 1, "ep": layout.ep, "dp": layout.expert_dp, "pp": layout.pp}
    found = {name: orthogonal_groups(decoder, together) for name, together in _DECODER.items()}
    found |= {name: orthogonal_groups(expert, together) for name, together in _EXPERT.items()}
    found["embd"] = tuple((ranks[0],) if len(ranks) == 1 else (ranks[0], ranks[-1]) for ranks in found["pp"])
    found["pos_embd"] = tuple((ranks[0],) for ranks in found["pp"])
    found["intra_dist_opt"] = (tuple(rank for ranks in found["tp_ep_pp"] for rank in ranks),)
    found["world"] = (tuple(range(layout.world_size)),)
    return found


def groups_of(layout: Layout, global_rank: int) -> dict[str, Ranks]:
    """The groups that one rank is in; it is in none of `embd` and `pos_embd` if its stage holds no embedding."""
    layout.slot_of(global_rank)
    return {name: ranks for name, lists in groups(layout).items() for ranks in lists if global_rank in ranks}
