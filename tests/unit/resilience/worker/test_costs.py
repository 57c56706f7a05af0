"""What a rank tells of a switch: its own time, links, bytes and memory, once, and nothing of the switch before."""

from __future__ import annotations

import pytest

from megatron.resilience.protocol.messages import Measured
from megatron.resilience.worker import costs as module
from megatron.resilience.worker.costs import Costs
from megatron.resilience.worker.memory import MemoryLook
from megatron.resilience.worker.meter import Meter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


class Rank:
    """A rank whose iterations take 10 ms, and what it holds."""

    def __init__(self, clock: Clock, *, is_new: bool = False) -> None:
        self.clock = clock
        self.tensors, self.links, self.peak, self.looks = 1000, 50, 7000, 0
        self.meter = Meter()
        look = MemoryLook(tensor_bytes=self.look, link_bytes=lambda: self.links, peak_bytes=lambda: self.peak)
        self.costs = Costs(look, self.meter, is_new=is_new)
        self.iteration = 0

    def look(self) -> int:
        self.looks += 1
        return self.tensors

    def train(self, iterations: int, duration_ms: float = 10.0, bytes_moved: int = 0) -> Measured | None:
        measured = None
        for _ in range(iterations):
            self.clock.now_s += duration_ms / 1e3
            self.iteration += 1
            measured = self.costs.arrive(self.iteration, bytes_moved)
        return measured


def test_a_switch_is_told_with_time_links_bytes_memory_and_phases(clock: Clock) -> None:
    rank = Rank(clock)
    rank.train(6)
    assert rank.looks == 0, "a look takes time, which no iteration far from a switch should pay"
    rank.costs.begin()
    rank.links = 250  # prepared ones
    rank.train(1, duration_ms=14.0)
    rank.costs.granted(2, boundary=8)
    assert rank.train(1) is None
    clock.now_s += 0.001
    with rank.costs.phase("commit"):
        clock.now_s += 0.004
    rank.costs.links = (5, 2)
    rank.tensors, rank.links = 1100, 60
    measured = rank.train(1, duration_ms=20.0, bytes_moved=77)
    assert measured is not None
    assert (measured.generation, measured.boundary) == (2, 8)
    assert measured.downtime_ms == pytest.approx(15.0)
    assert measured.lost_ms == pytest.approx(4.0 + 15.0)
    assert measured.median_iteration_ms == pytest.approx(10.0)
    assert (measured.links_kept, measured.links_replaced, measured.bytes_moved) == (5, 2, 77)
    assert (measured.memory_before_bytes, measured.memory_after_bytes, measured.peak_bytes) == (1050, 1160, 7000)
    assert measured.phases["commit"] == pytest.approx((1.0, 4.0))
    assert rank.train(3) is None, "it is told once"
    assert rank.looks == 2


def test_a_rank_that_joined_measures_from_its_leavers_boundary_and_goes_on_from_there(clock: Clock) -> None:
    leaver, joiner = Rank(clock), Rank(clock, is_new=True)
    leaver.train(30)
    leaver.costs.announce(clock.now_s)
    leaver.costs.begin()
    leaver.train(1, duration_ms=16.0)
    clock.now_s += 0.100
    joiner.meter.restore(leaver.meter.capture(clock.now_s), clock.now_s)
    clock.now_s += 0.020
    joiner.costs.granted(2, boundary=31)
    assert joiner.costs.arrive(31, 0) is None
    clock.now_s += 0.050
    first = joiner.costs.arrive(32, 0)
    assert first is not None
    assert first.downtime_ms == pytest.approx(100.0 + 20.0 + 50.0 - 10.0)
    assert first.lost_ms == pytest.approx(6.0 + 160.0)
    assert first.median_iteration_ms == pytest.approx(10.0)
    assert (first.memory_before_bytes, first.memory_after_bytes) == (0, 1050)
    joiner.iteration = 32
    joiner.train(5)
    joiner.costs.granted(3, boundary=joiner.iteration + 1)
    joiner.train(1)
    second = joiner.train(1, duration_ms=12.0)
    assert second is not None
    assert second.downtime_ms == pytest.approx(2.0)
    assert (second.memory_before_bytes, second.memory_after_bytes) == (1050, 1050)


def test_a_rank_that_has_nothing_to_compare_with_tells_no_time(clock: Clock) -> None:
    rank = Rank(clock)
    rank.train(1)
    rank.costs.granted(2, boundary=1)
    measured = rank.train(1, duration_ms=500.0)
    assert measured is not None
    assert (measured.downtime_ms, measured.lost_ms) == (None, None)


def test_the_next_switch_starts_from_nothing(clock: Clock) -> None:
    rank = Rank(clock)
    rank.train(4)
    rank.costs.granted(2, boundary=4)
    rank.costs.links = (5, 2)
    with rank.costs.phase("commit"):
        pass
    assert rank.train(1) is not None
    rank.tensors = 3000
    rank.costs.granted(3, boundary=6)
    measured = rank.train(2)
    assert measured is not None
    assert (measured.links_kept, measured.links_replaced, measured.phases) == (0, 0, {})
    assert measured.memory_before_bytes == 3050


def test_nothing_of_a_dropped_switch_is_told(clock: Clock) -> None:
    rank = Rank(clock)
    rank.train(4)
    rank.costs.begin()
    rank.costs.granted(2, boundary=5)
    with rank.costs.phase("hold"):
        pass
    rank.costs.drop()
    assert rank.train(3) is None
    rank.links = 70
    rank.costs.granted(3, boundary=rank.iteration + 1)
    measured = rank.train(2)
    assert measured is not None
    assert (measured.generation, measured.phases) == (3, {})
    assert measured.memory_before_bytes == 1070


def test_a_switch_that_began_before_this_rank_was_asked_costs_what_it_cost_meanwhile(clock: Clock) -> None:
    rank = Rank(clock)
    rank.train(6)
    began_s = clock.now_s + 0.001
    rank.train(1, duration_ms=25.0)
    rank.costs.announce(began_s)
    rank.costs.begin()
    rank.costs.granted(2, boundary=7)
    measured = rank.train(1, duration_ms=12.0)
    assert measured is not None
    assert measured.downtime_ms == pytest.approx(2.0)
    assert measured.lost_ms == pytest.approx(17.0)
