"""A rank's part in a switch, with traffic before, during and after. What ranks run, in their processes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trainmover_ext
from tests.distributed.collectives import operands, runner
from tests.distributed.collectives.schedules import Layout
from trainmover_ext import SwitchPhase, SwitchTally, rendezvous

LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Committed:
    """What a stayer saw of a commit."""

    tally: SwitchTally
    took_us: float
    links_prepared_for: int
    """Links that stood when the switch was prepared."""
    links_before: int
    links_after: int
    memory_before: dict[str, int]
    memory_after: dict[str, int]


def run(seeds: Sequence[int]) -> int:
    """Schedules of all ranks; the operations checked, bit for bit."""
    checked = sum(runner.Runner(seed).run() for seed in seeds)
    operands.check_inputs()
    return checked


def is_aborted() -> bool:
    return rendezvous.current().runtime.aborted()


def links_by_communicator() -> dict[str, int]:
    """Name -> how many links of it live on this rank."""
    return {stats["name"]: stats["links"] for stats in trainmover_ext.communicator_stats()}


def links() -> int:
    return sum(stats["links"] for stats in trainmover_ext.communicator_stats())


def held_by_links() -> dict[str, int]:
    """Bytes, and open sockets of this process."""
    sockets = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            sockets += os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
        except FileNotFoundError:  # the listing's own
            continue
    return {"link_buffers": trainmover_ext.memory_stats()["link_buffers"], "sockets": sockets}


MEMORY_BEFORE: dict[str, int] = {}
LINKS_THEN: list[int] = []


def prepare(generation: int, endpoints: Mapping[int, str]) -> None:
    MEMORY_BEFORE.clear()
    MEMORY_BEFORE.update(trainmover_ext.memory_stats())
    LINKS_THEN[:] = [links()]
    trainmover_ext.prepare_switch(generation, endpoints)


def prepare_and_run(generation: int, endpoints: Mapping[int, str], seeds: Sequence[int]) -> int:
    """Phase one goes on while this rank takes part in everything."""
    prepare(generation, endpoints)
    return run(seeds)


def wait_until(phase: SwitchPhase, generation: int) -> str:
    """The reason, if there is one."""
    deadline = time.monotonic() + LIMIT_S
    while (state := trainmover_ext.switch_state(generation)).phase is not phase:
        assert state.phase is not SwitchPhase.BROKEN, state
        assert time.monotonic() < deadline, state
        time.sleep(0.001)
    return state.reason


def commit(generation: int) -> Committed:
    links_before = links()
    started_ns = time.perf_counter_ns()
    tally = trainmover_ext.commit_switch(generation)
    took_us = (time.perf_counter_ns() - started_ns) / 1000
    return Committed(
        tally=tally,
        took_us=took_us,
        links_prepared_for=LINKS_THEN[0],
        links_before=links_before,
        links_after=links(),
        memory_before=dict(MEMORY_BEFORE),
        memory_after=trainmover_ext.memory_stats(),
    )


def commit_and_run(generation: int, seeds: Sequence[int], after_s: float) -> Committed:
    time.sleep(after_s)
    committed = commit(generation)
    run(seeds)
    return committed


def run_and_hear(generation: int, endpoints: Mapping[int, str], seeds: Sequence[int], after_s: float) -> int:
    """A far rank: goes on, and is told of the move at some time."""
    timer = threading.Timer(after_s, trainmover_ext.add_endpoints, (endpoints, generation))
    timer.start()
    checked = run(seeds)
    timer.join()
    return checked


def hold(generation: int) -> tuple[tuple[int, ...], str]:
    """Who is linked, and what the successor has to know."""
    linked = trainmover_ext.hold_links(generation)
    assert trainmover_ext.linked_ranks() == tuple(rank for rank in linked)
    return linked, trainmover_ext.handover()


def leave(generation: int, after_s: float) -> None:
    time.sleep(after_s)
    trainmover_ext.leave_switch(generation)


def join_alone(
    layout: Layout, rank: int, generation: int, endpoints: Mapping[int, str], generations: Mapping[int, int]
) -> str:
    """Built alone, and ready to be connected to."""
    endpoint = runner.join_alone(layout, rank)
    trainmover_ext.join_switch(generation, endpoints, generations)
    return endpoint


def go_live_and_run(
    generation: int, handover: str, endpoints: Mapping[int, str], seeds: Sequence[int], after_s: float
) -> int:
    time.sleep(after_s)
    trainmover_ext.go_live(generation, handover, endpoints)
    return run(seeds)


def chance_of(*parts: object) -> random.Random:
    return random.Random(runner.seed_for(*parts))
