"""Groups as megatron-core's own generator forms them, slots, roles, and sizes that do not fit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.resilience.protocol.layout import Layout, LayoutError, groups, groups_of, role_of, slot_ranks

SIZES = [1, 2, 3, 4]
TOKENS = {
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "dp_cp": "dp-cp",
    "cp": "cp",
    "mp": "tp-pp",
    "tp_dp": "tp-dp",
    "tp_dp_cp": "tp-dp-cp",
    "tp_cp": "tp-cp",
}
EXPERT_TOKENS = {"ep": "ep", "expt_tp": "tp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp", "expt_dp": "dp"}


@pytest.mark.parametrize(("tp", "pp", "cp", "dp"), itertools.product([1, 2, 3], [1, 2, 4], [1, 2], [1, 2, 3]))
def test_groups_are_those_of_megatron_core(tp: int, pp: int, cp: int, dp: int) -> None:
    from megatron.core.parallel_state import (
        RankGenerator,
        default_embedding_ranks,
        default_position_embedding_ranks,
    )

    world = tp * pp * cp * dp
    theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    ours = groups(Layout(world_size=world, ranks_per_machine=1, tp=tp, pp=pp, cp=cp))
    for name, token in TOKENS.items():
        assert [list(ranks) for ranks in ours[name]] == theirs.get_ranks(token), name
    pipelines = theirs.get_ranks("pp")
    assert [list(ranks) for ranks in ours["embd"]] == [default_embedding_ranks(ranks) for ranks in pipelines]
    assert [list(r) for r in ours["pos_embd"]] == [default_position_embedding_ranks(ranks) for ranks in pipelines]
    assert ours["world"] == (tuple(range(world)),)


@pytest.mark.parametrize(("etp", "ep", "pp", "edp"), itertools.product([1, 2], [1, 2, 4], [1, 2], [1, 2]))
def test_expert_groups_are_those_of_megatron_core(etp: int, ep: int, pp: int, edp: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    world = etp * ep * pp * edp
    theirs = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    ours = groups(Layout(world_size=world, ranks_per_machine=1, tp=1, pp=pp, ep=ep, etp=etp))
    for name, token in EXPERT_TOKENS.items():
        assert [list(ranks) for ranks in ours[name]] == theirs.get_ranks(token), name
    assert sorted(ours["intra_dist_opt"][0]) == list(range(world))


@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from(SIZES))
def test_every_group_divides_the_ranks(tp: int, pp: int, dp: int) -> None:
    layout = Layout(world_size=tp * pp * dp, ranks_per_machine=1, tp=tp, pp=pp)
    for name, lists in groups(layout).items():
        ranks = [rank for one in lists for rank in one]
        assert len(ranks) == len(set(ranks)), name
        if name not in ("embd", "pos_embd"):
            assert sorted(ranks) == list(range(layout.world_size)), name


def test_groups_of_a_rank_are_those_that_hold_it() -> None:
    layout = Layout(world_size=8, ranks_per_machine=2, tp=2, pp=2)
    mine = groups_of(layout, 5)
    assert mine["tp"] == (4, 5)
    assert mine["pp"] == (1, 5)
    assert mine["dp"] == (5, 7)
    assert "pos_embd" not in mine


def test_slots_hold_ranks_in_order() -> None:
    layout = Layout(world_size=8, ranks_per_machine=2)
    assert layout.slots == 4
    assert layout.ranks_of(2) == slot_ranks(2, 2) == (4, 5)
    assert [layout.slot_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_roles_are_pipeline_stages() -> None:
    layout = Layout(world_size=8, ranks_per_machine=1, pp=4)
    assert [role_of(layout, rank) for rank in (0, 1, 2, 5, 6)] == ["first", "first", "middle", "middle", "last"]
    assert role_of(Layout(world_size=2, ranks_per_machine=1), 1) == "only"


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 3}, {"pp": 5}, {"ep": 3}, {"ranks_per_machine": 3}, {"tp": 0}, {"world_size": 0}, {"etp": 16}],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="expected a multiple"):
        Layout(**{"world_size": 8, "ranks_per_machine": 2, **sizes})


def test_ranks_outside_are_refused() -> None:
    with pytest.raises(LayoutError, match="expected 0 to 7"):
        Layout(world_size=8, ranks_per_machine=2).slot_of(8)
