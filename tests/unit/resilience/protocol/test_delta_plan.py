"""What a switch touches: only links to ranks that move, and nothing at all for ranks far away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.resilience.protocol.delta_plan import (
    EMPTY,
    CommunicatorDelta,
    Link,
    PlanError,
    joiner_delta,
    linked_stayers,
    plans,
    stayer_delta,
)

RING: list[Link] = [("dp", rank, (rank + 1) % 8) for rank in range(8)]
MOVING = frozenset({2, 3})

links = st.lists(
    st.tuples(st.sampled_from(["tp", "dp", "pp"]), st.integers(0, 9), st.integers(0, 9)).filter(lambda x: x[1] != x[2])
)


def test_neighbours_replace_one_link_and_keep_the_other() -> None:
    found = plans(RING, MOVING)
    assert set(found) == {1, 2, 3, 4}
    assert found[1].communicators == {"dp": CommunicatorDelta(kept=(0,), dropped=(2,), added=(2,))}
    assert found[4].communicators == {"dp": CommunicatorDelta(kept=(5,), dropped=(3,), added=(3,))}
    assert (found[1].replaced, found[1].peers) == (1, (2,))


def test_joiners_build_all_links_of_their_rank() -> None:
    assert plans(RING, MOVING)[2].communicators == {"dp": CommunicatorDelta(added=(1, 3))}
    assert joiner_delta(2, [("dp", 2, 1), ("tp", 2, 3)]).peers == (1, 3)


def test_a_rank_far_away_has_an_empty_plan() -> None:
    assert 6 not in plans(RING, MOVING)
    assert stayer_delta(6, [("dp", 5, 6), ("dp", 6, 7)], MOVING) is EMPTY
    assert EMPTY.is_empty
    assert EMPTY.peers == ()
    assert linked_stayers(RING, MOVING) == {1, 4}


def test_communicators_without_a_moving_peer_are_left_alone() -> None:
    found = stayer_delta(1, [("dp", 1, 2), ("tp", 0, 1)], MOVING)
    assert list(found.communicators) == ["dp"]


@given(links, st.frozensets(st.integers(0, 9), max_size=3))
def test_both_ends_of_a_link_agree(used: list[Link], moving: frozenset[int]) -> None:
    found = plans(used, moving)
    for communicator, a, b in used:
        for one, other in ((a, b), (b, a)):
            delta = found.get(one, EMPTY).communicators.get(communicator)
            if one in moving or other in moving:
                assert delta is not None
                assert other in delta.added
                assert (other in delta.dropped) == (one not in moving)
            elif delta is not None:
                assert other in delta.kept
    assert set(found) - moving == linked_stayers(used, moving)


def test_links_of_others_and_plans_of_leavers_are_refused() -> None:
    with pytest.raises(PlanError, match="expected one of global rank 1"):
        stayer_delta(1, [("dp", 2, 3)], MOVING)
    with pytest.raises(PlanError, match="expected one of global rank 1"):
        joiner_delta(1, [("dp", 1, 1)])
    with pytest.raises(PlanError, match="moves"):
        stayer_delta(2, [], MOVING)
