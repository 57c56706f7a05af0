from __future__ import annotations

import pytest

from megatron.resilience.worker.meter import Meter, SwitchCost


def run(meter: Meter, durations_ms: list[float], *, first: int = 1, start_s: float = 100.0) -> list[SwitchCost | None]:
    """Arrives at `first`, then once more after each duration."""
    now_s, costs = start_s, []
    for number, duration_ms in enumerate([0.0, *durations_ms]):
        now_s += duration_ms / 1e3
        costs.append(meter.arrive(first + number, now_s))
    return costs


def test_downtime_is_the_switch_iteration_less_the_median_before_it() -> None:
    meter = Meter()
    run(meter, [10.0] * 5)
    meter.granted(generation=2, boundary=6)
    (cost,) = [meter.arrive(7, 100.0 + 0.050 + 0.045)]
    assert cost is not None
    assert cost.downtime_ms == pytest.approx(35.0)
    assert (cost.generation, cost.boundary) == (2, 6)
    assert cost.median_iteration_ms == pytest.approx(10.0)


def test_lost_time_counts_preparation_but_not_what_was_before_it() -> None:
    meter = Meter()
    run(meter, [500.0, *[10.0] * 20])
    now_s = 100.0 + 0.5 + 0.2
    meter.begin(now_s)  # in iteration 22
    for iteration, duration_ms in ((23, 14.0), (24, 12.0)):
        now_s += duration_ms / 1e3
        assert meter.arrive(iteration, now_s) is None
    meter.granted(generation=3, boundary=24)
    cost = meter.arrive(25, now_s + 0.030)
    assert cost is not None
    assert cost.downtime_ms == pytest.approx(20.0)
    assert cost.lost_ms == pytest.approx(4.0 + 2.0 + 20.0)


def test_lost_time_counts_from_where_the_switch_began_elsewhere() -> None:
    meter = Meter()
    run(meter, [*[10.0] * 20, 30.0, 10.0])
    meter.begin(100.0 + 0.2 + 0.029)  # within the slow iteration, though this rank is asked to prepare only now
    meter.granted(generation=3, boundary=23)
    cost = meter.arrive(24, 100.0 + 0.24 + 0.025)
    assert cost is not None
    assert cost.median_iteration_ms == pytest.approx(10.0)
    assert cost.lost_ms == pytest.approx(20.0 + 0.0 + 15.0)


def test_what_the_loop_does_between_iterations_is_in_no_figure() -> None:
    meter = Meter()
    run(meter, [10.0] * 20)
    now_s = 100.0 + 0.2
    for iteration, duration_ms, paused_ms in ((22, 11.0, 0.0), (23, 14.0, 700.0), (24, 10.0, 0.0)):
        meter.begin(now_s)
        now_s += (duration_ms + paused_ms) / 1e3
        meter.leave_out(paused_ms / 1e3)
        assert meter.arrive(iteration, now_s) is None
    meter.granted(generation=3, boundary=24)
    meter.leave_out(30.0)  # an evaluation ends the iteration of the switch
    cost = meter.arrive(25, now_s + 30.0 + 0.012)
    assert cost is not None
    assert cost.downtime_ms == pytest.approx(2.0)
    assert cost.lost_ms == pytest.approx(1.0 + 4.0 + 0.0 + 2.0)
    assert meter.median_ms() == pytest.approx(10.0)


def test_a_switch_that_costs_less_than_nothing_is_not_clamped() -> None:
    meter = Meter()
    run(meter, [10.0] * 4)
    meter.granted(generation=2, boundary=5)
    cost = meter.arrive(6, 100.0 + 0.040 + 0.007)
    assert cost is not None
    assert cost.downtime_ms == pytest.approx(-3.0)


def test_the_cost_comes_once_and_only_after_the_boundary() -> None:
    meter = Meter()
    run(meter, [10.0] * 4)
    meter.granted(generation=2, boundary=6)  # granted while iteration 5 runs
    assert meter.arrive(6, 100.05) is None
    assert meter.arrive(7, 100.06) is not None
    assert meter.arrive(8, 100.07) is None


def test_what_was_dropped_is_not_charged_to_the_next_switch() -> None:
    meter = Meter()
    run(meter, [10.0] * 3)
    meter.begin(100.03)
    meter.arrive(5, 101.0)  # a slow iteration of a switch that is off
    meter.drop()
    meter.granted(generation=4, boundary=5)
    cost = meter.arrive(6, 101.01)
    assert cost is not None
    assert cost.lost_ms == pytest.approx(cost.downtime_ms)


def test_what_is_handed_over_are_ages_of_what_a_cost_is_made_of() -> None:
    leaver, joiner = Meter(), Meter()
    run(leaver, [10.0] * 100, start_s=50.0)
    leaver.begin(51.0)
    leaver.leave_out(0.5)
    leaver.arrive(102, 51.512)
    leaver.granted(generation=4, boundary=102)
    values = leaver.capture(51.6)
    assert [age[0] for age in values["arrivals"]] == list(range(81, 103)), "twenty iterations, and those since"
    joiner.restore(values, 1000.0)  # another machine's clock
    joiner.granted(generation=4, boundary=102)
    assert joiner.arrive(102, 1000.1) is None
    cost = joiner.arrive(103, 1000.2)
    assert cost is not None
    assert (cost.generation, cost.boundary) == (4, 102)
    assert cost.downtime_ms == pytest.approx(88.0 + 200.0 - 10.0)
    assert cost.lost_ms == pytest.approx(2.0 + 278.0)
    assert cost.median_iteration_ms == pytest.approx(10.0)


def test_nothing_yet_can_be_handed_over_too() -> None:
    joiner = Meter()
    joiner.restore(Meter().capture(5.0), 1000.0)
    assert joiner.arrive(1, 1001.0) is None
    assert joiner.median_ms() == 0.0


def test_the_median_is_of_the_last_twenty() -> None:
    meter = Meter()
    assert meter.median_ms() == 0.0
    run(meter, [1000.0] * 30 + [30.0] * 10 + [10.0] * 10)
    assert meter.median_ms() == pytest.approx(20.0)
