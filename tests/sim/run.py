"""Runs one simulation from its seed, to the end: job starts, users migrate, faults happen, all must be decided.

    python -m tests.sim.run SEED [LEVEL ...]

runs one seed, with faults of one of these levels, and prints everything that happened in it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.invariants import InvariantViolation
from megatron.resilience.protocol.switch import ImpossibleTransition
from tests.sim.faults import LEVELS, RandomFaults
from tests.sim.job import Job, MachineSpec, Shape
from tests.sim.world import Stuck, World

HORIZON_MS = 1_800.0
"""Faults and commands come before this."""
LIMIT_MS = 60_000.0
"""By when all must be decided, as faults end at the horizon."""
SILENCE_MS = 12_000.0
"""How long no iteration may pass while all members live: a little over the longest wait of a rank."""


class Violation(Exception):  # noqa: N818 - what was found
    """A seed has broken a rule. Whatever else a simulation raises is a defect of the simulator, or of what it calls."""


GENUINE = (InvariantViolation, ImpossibleTransition, Stuck, Violation)
"""What it shows as: an invariant, a pair no table has, somebody who waits for ever, a job that ends for nothing."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a simulation came to."""

    seed: int
    done: int
    aborted: int
    failed: str
    iterations: int
    steps: int
    terms: int


def random_shape(world: World) -> Shape:
    """A small job: two or three slots of one or two ranks, sparse links, one to three machines beside."""
    chance = world.chance
    slots, per_machine, spare = chance.choice((2, 3)), chance.choice((1, 1, 2)), chance.choice((1, 2, 2, 3))
    racks = ("a", "b") if chance.random() < 0.5 else ("",)
    machines = [MachineSpec(machine_id=f"m{slot}", rack=chance.choice(racks)) for slot in range(slots)]
    for number in range(slots, slots + spare):
        odd = chance.random()
        machines.append(
            MachineSpec(
                machine_id=f"m{number}",
                rack=chance.choice(racks),
                elastic=True,
                facts=Facts(torch="2.12.0" if odd < 0.05 else "2.13.0"),
                model_digest="m2" if 0.05 < odd < 0.12 else "m1",
                memory_bytes=10 if 0.12 < odd < 0.15 else 1_000,
                free_bytes=100 if 0.15 < odd < 0.18 else 1_000,
            )
        )
    size = slots * per_machine
    links = {(rank, rank + 1) for rank in range(size - 1)}
    links |= {tuple(sorted(chance.sample(range(size), 2))) for _ in range(chance.randrange(3))}  # type: ignore[misc]
    return Shape(slots=slots, per_machine=per_machine, machines=tuple(machines), links=tuple(sorted(links)))


def plan_commands(job: Job) -> None:
    """One to three migrations, now and then twice the same, of two machines, or of none that can be."""
    world, chance = job.world, job.world.chance
    names = [machine.machine_id for machine in job.shape.machines]
    for _ in range(chance.choice((1, 1, 2, 2, 3))):
        leavers = tuple(chance.sample(names[: job.shape.slots], 2 if chance.random() < 0.2 else 1))
        if chance.random() < 0.15:
            leavers = (chance.choice([*names, "nobody"]),)
        to = tuple(chance.sample(names[job.shape.slots :], 1)) if len(leavers) == 1 and chance.random() < 0.2 else ()
        when_ms = chance.uniform(100, HORIZON_MS / 2)
        world.after(when_ms, ask, job, leavers, to)


def ask(job: Job, leavers: tuple[str, ...], to: tuple[str, ...]) -> None:
    """Once the job runs; a few are earlier, and are refused."""
    if job.iterations_done or job.world.chance.random() < 0.02:
        job.users.migrate(*leavers, to=to)
    elif not job.is_over:
        job.world.after(50, ask, job, leavers, to)


def watch_progress(job: Job) -> None:
    """Training goes on whether or not there is a controller: rule of the house."""

    def look() -> None:
        trains = job.iterations_done > 0 and not job.failed and not job.exit_requested
        if trains and not job.excuse and job.world.now_ms - job.last_iteration_ms > SILENCE_MS:
            raise Violation(f"no iteration since {job.last_iteration_ms:.0f} ms")
        if not job.is_over:
            job.world.after(500, look)

    look()


def simulate(seed: int, levels: tuple[float, ...] = LEVELS, *, lines: list[str] | None = None) -> Outcome:
    """`lines` takes the transcript. Raises Violation, with how to run it again."""
    world = World(seed)
    world.transcript = lines
    job: Job | None = None
    again = " ".join(["python -m tests.sim.run", str(seed), *(str(level) for level in levels if levels != LEVELS)])
    try:
        faults = RandomFaults(horizon_ms=HORIZON_MS, levels=levels)
        job = Job(world, random_shape(world), faults)
        faults.begin(job)
        plan_commands(job)
        watch_progress(job)
        to_the_end(job)
        return outcome(job)
    except GENUINE as error:
        standing = "\n".join(p.describe() for p in job.processes if p.alive) if job else ""
        raise Violation(
            f"seed {seed} at {world.now_ms:.1f} ms, step {world.steps}: {type(error).__name__}: {error}\n{standing}\n"
            f"run it again with: {again}"
        ) from error
    except Exception as error:
        error.add_note(f"in the simulation of seed {seed}; run it again with: {again}")
        raise


def to_the_end(job: Job) -> None:
    """Until all commands are decided, then until the job has ended by itself."""
    world = job.world
    world.run(until=lambda: world.now_ms >= HORIZON_MS and job.is_quiet, limit_ms=LIMIT_MS)
    job.exit_requested = True
    world.run(until=lambda: job.is_over, limit_ms=world.now_ms + LIMIT_MS)
    ledger = job.controller.ledger
    restarted = any(f"machine {name} has started anew" in ledger.ended_why for name in job.crashed)
    if not ledger.ended_ok and not job.excuse and not restarted:
        raise Violation(f"the job failed without need: {ledger.ended_why} ({job.failed})")
    if ledger.ended_ok and job.failed and not job.excuse:
        raise Violation(f"the job is said to have ended well, but {job.failed}")


def outcome(job: Job) -> Outcome:
    ledger = job.controller.ledger
    outcomes = [incident.outcome for incident in ledger.incidents.values()]
    return Outcome(
        seed=job.world.seed,
        done=outcomes.count("done"),
        aborted=outcomes.count("aborted"),
        failed="" if ledger.ended_ok else ledger.ended_why,
        iterations=job.iterations_done,
        steps=job.world.steps,
        terms=job.controller.term,
    )


def main(arguments: list[str]) -> int:
    """Runs the seed that is named, and prints all of it; 1 if it breaks a rule."""
    seed, levels = int(arguments[0]), tuple(float(level) for level in arguments[1:]) or LEVELS
    lines: list[str] = []
    ending: Outcome | Violation
    try:
        ending = simulate(seed, levels, lines=lines)
    except Violation as violation:
        ending = violation
    print("\n".join([*lines, str(ending)]))
    return int(isinstance(ending, Violation))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
