"""Named scenarios, each about one thing, written down as a transcript that anyone can read: tests/transcripts/.

All have one small job: slots 0 to 2 on m0 to m2, one rank each, links 0-1 and 1-2; m3 and m4 are elastic.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.resilience.protocol.facts import Facts
from megatron.resilience.protocol.journal import AnyEntry
from megatron.resilience.protocol.messages import Built, Cast, Left, RankReport, Ready
from tests.sim.faults import Faults
from tests.sim.job import Job, MachineSpec, Shape
from tests.sim.process import Process
from tests.sim.run import to_the_end
from tests.sim.world import World

MACHINES = (
    MachineSpec(machine_id="m0", rack="a"),
    MachineSpec(machine_id="m1", rack="b"),
    MachineSpec(machine_id="m2", rack="a"),
    MachineSpec(machine_id="m3", rack="a", elastic=True),
    MachineSpec(machine_id="m4", rack="b", elastic=True),
)
Arrange = Callable[[Job, Faults], None]


def shape(machines: tuple[MachineSpec, ...] = MACHINES, *, per_machine: int = 1) -> Shape:
    links = tuple((rank, rank + 1) for rank in range(3 * per_machine - 1))
    return Shape(slots=3, per_machine=per_machine, machines=machines, links=links)


def at_iteration(job: Job, iteration: int, deed: Callable[[], object]) -> None:
    """Once, when the vote of `iteration` has closed."""
    if job.iterations_done >= iteration:
        deed()
    else:
        job.world.after(5, at_iteration, job, iteration, deed)


def when_joiner_reports(faults: Faults, kind: type[RankReport], deed: Callable[[Process], None]) -> None:
    """At the first such report of a joiner rank, before it goes out."""
    done: list[bool] = []

    def look(process: Process, report: RankReport) -> None:
        if isinstance(report, kind) and process.generation > 1 and not done:
            done.append(True)
            deed(process)

    faults.on_report = look


def plain(job: Job, faults: Faults) -> None:
    """One machine is replaced, and nothing goes wrong."""
    at_iteration(job, 5, lambda: job.users.migrate("m1"))


def two_ranks(job: Job, faults: Faults) -> None:
    """Machines of two ranks: the leaver's second rank tells the lead by note."""
    at_iteration(job, 5, lambda: job.users.migrate("m2"))


def two_leavers(job: Job, faults: Faults) -> None:
    """Two machines leave in one switch; the lowest slot's lead decides for both."""
    at_iteration(job, 5, lambda: job.users.migrate("m0", "m1"))


def there_and_back(job: Job, faults: Faults) -> None:
    """Back to the first machine, with a generation of its own."""
    at_iteration(job, 5, lambda: job.users.migrate("m1", to=("m4",)))
    at_iteration(job, 30, lambda: job.users.migrate("m4", to=("m1",)))


def queued(job: Job, faults: Faults) -> None:
    """A second migration comes while one is under way, and the same command twice."""
    at_iteration(job, 5, lambda: job.users.migrate("m0"))
    at_iteration(job, 6, lambda: job.users.migrate("m2", command_id="second"))
    at_iteration(job, 6, lambda: job.users.migrate("m2", command_id="second"))
    at_iteration(job, 7, lambda: job.users.migrate("m0"))


def refused(job: Job, faults: Faults) -> None:
    """Everything that is refused, with its reason; the job is undisturbed."""
    asks: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
        (("m9",), ()),
        (("m3",), ()),
        (("m1",), ("m0",)),
        (("m1",), ("m3",)),
        (("m1",), ("m4",)),
        (("m1",), ("m5",)),
        (("m1", "m1"), ()),
        (("m0", "m1"), ("m3",)),
        (("m1",), ()),
    )
    for number, (leavers, to) in enumerate(asks):
        at_iteration(job, 4 + number, lambda leavers=leavers, to=to: job.users.migrate(*leavers, to=to))  # type: ignore[misc]


def veto(job: Job, faults: Faults) -> None:
    """A save is not finalised when the lead casts: vetoed, and cast again."""
    at_iteration(job, 5, lambda: job.users.migrate("m1"))

    def save(process: Process, report: RankReport) -> None:
        if isinstance(report, Ready) and process.generation > 1:
            job.saves[2] = job.world.now_ms + 150

    faults.on_report = save


def other_model(job: Job, faults: Faults) -> None:
    """The joiner has built another model: refused, and the next candidate is taken."""
    at_iteration(job, 5, lambda: job.users.migrate("m1"))


def little_room(job: Job, faults: Faults) -> None:
    """The joiner's machine has less left than the leaver's ranks have needed: refused, and the next is taken."""
    at_iteration(job, 5, lambda: job.users.migrate("m1"))


def joiner_dies_building(job: Job, faults: Faults) -> None:
    """The joiner dies when it has just built: aborted, next candidate."""
    at_iteration(job, 5, lambda: job.users.migrate("m1"))
    when_joiner_reports(faults, Built, lambda process: process.end(-9, "killed"))


def joiner_dies_ready(job: Job, faults: Faults) -> None:
    """The joiner's machine crashes when all are about to be READY."""
    at_iteration(job, 5, lambda: job.users.migrate("m1"))
    when_joiner_reports(faults, Ready, lambda process: process.machine.crash())


def joiner_dies_at_the_boundary(job: Job, faults: Faults) -> None:
    """The joiner dies while it takes the state: STAY, and the next candidate."""
    at_iteration(job, 5, lambda: job.users.migrate("m1"))
    done: list[bool] = []

    def look(process: Process, report: RankReport) -> None:
        if isinstance(report, Cast) and not done:
            done.append(True)
            joiner = next(other for other in job.processes if other.alive and other.generation > 1)
            job.world.after(1, joiner.end, -9, "killed")

    faults.on_report = look


def joiner_dies_after_leave(job: Job, faults: Faults) -> None:
    """The joiner dies after the point of no return: until recovery exists, a clear error and a clean end."""
    at_iteration(job, 5, lambda: job.users.migrate("m1"))

    def look(process: Process, report: RankReport) -> None:
        if isinstance(report, Left):
            joiner = next(other for other in job.processes if other.generation > 1)
            job.world.after(0.1, joiner.end, -9, "killed")

    faults.on_report = look


def leaver_dies_at_the_boundary(job: Job, faults: Faults) -> None:
    """The leaver's machine crashes half-way through the transfer: a clear error and a clean end."""
    at_iteration(job, 5, lambda: job.users.migrate("m1"))

    def look(process: Process, report: RankReport) -> None:
        if isinstance(report, Cast):
            job.world.after(1, process.machine.crash)

    faults.on_report = look


def transfer_lost_after_leave(job: Job, faults: Faults) -> None:
    """The verdict's frame is lost with the transfer's connection: the joiner asks, the lead's word reaches it."""
    at_iteration(job, 5, lambda: job.users.migrate("m1"))

    def look() -> None:
        if job.verdicts:
            for transfer in list(job.transfers.known.values()):
                job.transfers.cut(transfer)
        elif not job.is_over:
            job.world.after(0.05, look)

    look()


def cut_off_stayer(job: Job, faults: Faults) -> None:
    """A stayer's agent is cut off while it should prepare; it is told when it is back."""
    at_iteration(job, 5, lambda: job.users.migrate("m1"))
    when_joiner_reports(faults, Built, lambda process: job.machines["m2"].partition(400))


def new_link(job: Job, faults: Faults) -> None:
    """A link to the leaver comes up after READY: vetoed until that rank is prepared too."""
    at_iteration(job, 5, lambda: job.users.migrate("m0"))
    when_joiner_reports(faults, Ready, lambda process: job.link_appears(0, 2))


def controller_dies_at(kind: str) -> Arrange:
    """The controller is killed just after an entry of this kind is on disk, and comes back."""

    def arrange(job: Job, faults: Faults) -> None:
        at_iteration(job, 5, lambda: job.users.migrate("m1"))
        died: list[bool] = []

        def crash(number: int, entry: AnyEntry) -> bool:
            if type(entry).__name__ != kind or died:
                return False
            died.append(True)
            return True

        job.controller.crash_at = crash

    return arrange


ODD = (
    *MACHINES[:3],
    MachineSpec(machine_id="m3", elastic=True, facts=Facts(torch="2.12.0", gpu="H200")),
    MachineSpec(machine_id="m4", elastic=True, ranks=0),
    MachineSpec(machine_id="m5", elastic=True, memory_bytes=10),
)
OTHER_MODEL = (*MACHINES[:4], MachineSpec(machine_id="m4", rack="b", elastic=True, model_digest="m2"))
LITTLE_ROOM = (*MACHINES[:4], MachineSpec(machine_id="m4", rack="b", elastic=True, free_bytes=700))

SCENARIOS: dict[str, tuple[Arrange, Shape]] = {
    "plain": (plain, shape()),
    "two_ranks": (two_ranks, shape(per_machine=2)),
    "two_leavers": (two_leavers, shape()),
    "there_and_back": (there_and_back, shape()),
    "queued": (queued, shape()),
    "refused": (refused, shape(ODD)),
    "veto": (veto, shape()),
    "other_model": (other_model, shape(OTHER_MODEL)),
    "little_room": (little_room, shape(LITTLE_ROOM, per_machine=2)),
    "joiner_dies_building": (joiner_dies_building, shape()),
    "joiner_dies_ready": (joiner_dies_ready, shape()),
    "joiner_dies_at_the_boundary": (joiner_dies_at_the_boundary, shape()),
    "joiner_dies_after_leave": (joiner_dies_after_leave, shape()),
    "leaver_dies_at_the_boundary": (leaver_dies_at_the_boundary, shape()),
    "transfer_lost_after_leave": (transfer_lost_after_leave, shape()),
    "cut_off_stayer": (cut_off_stayer, shape()),
    "new_link": (new_link, shape()),
    **{
        f"controller_dies_at_{kind}": (controller_dies_at(kind), shape())
        for kind in ("CommandTaken", "SwitchBegun", "SwitchPhase", "SwitchGo", "SwitchLeft", "SwitchDone")
    },
}


def play(name: str) -> tuple[Job, list[str]]:
    """Runs a scenario to its end; (the job, its transcript)."""
    arrange, job_shape = SCENARIOS[name]
    world = World(1)
    world.transcript = []
    faults = Faults()
    job = Job(world, job_shape, faults)
    arrange(job, faults)
    to_the_end(job)
    heading = arrange.__doc__ or f"The controller is killed just after {name.rsplit('_', 1)[1]} is on disk."
    return job, [heading.strip(), "", *world.transcript]
