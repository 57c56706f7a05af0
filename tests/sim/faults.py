"""What goes wrong in a simulation, and when: drawn from the seed, at moments in time and at steps of the protocol.

`NoFaults` lets everything go well; scenarios put their own fault at the step they are about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.resilience.protocol.joiner import Joiner, JoinerState
from megatron.resilience.protocol.journal import AnyEntry
from megatron.resilience.protocol.messages import Armed, Cast, Left, Measured, Progress, RankReport, Ready, Stayed

if TYPE_CHECKING:
    from tests.sim.job import Job
    from tests.sim.process import Process
    from tests.sim.transfers import Transfer


_KINDS = ("controller", "cut", "partition", "crash", "transfer", "kill", "link", "user")
_ODDS = (3, 4, 3, 2, 4, 2, 3, 1)
LEVELS = (0.0, 0.3, 1.0, 2.0)
"""How bad it may get: 0 is a job with users and saves alone."""


class NoFaults:
    """Nothing goes wrong."""

    def begin(self, job: Job) -> None:
        """The job's machines are up, nothing has happened yet."""

    def rank_reports(self, process: Process, report: RankReport) -> None:
        """A report is about to reach its agent."""

    def vote_closes(self, iteration: int) -> None:
        """All ranks have voted."""

    def verdict_goes(self, transfer: Transfer) -> None:
        """The last frame of a transfer is about to go out."""


class Faults(NoFaults):
    """Hooks that a scenario sets."""

    def __init__(self) -> None:
        self.on_report: Callable[[Process, RankReport], None] = lambda process, report: None
        self.on_vote: Callable[[int], None] = lambda iteration: None

    def rank_reports(self, process: Process, report: RankReport) -> None:
        self.on_report(process, report)

    def vote_closes(self, iteration: int) -> None:
        self.on_vote(iteration)


class RandomFaults(Faults):
    """Drawn from the world's chance: how bad it gets differs from seed to seed."""

    def __init__(self, *, horizon_ms: float, levels: tuple[float, ...] = LEVELS) -> None:
        super().__init__()
        self.horizon_ms, self.levels = horizon_ms, levels

    def begin(self, job: Job) -> None:
        self.job, chance = job, job.world.chance
        self.level = chance.choice(self.levels)
        self.deaths = chance.choice((0.0, 0.0, 0.0, 1.0))
        """Whether machines that hold a slot may die, which ends the job."""
        job.controller.stalls = 0.02 * self.level
        job.controller.crash_at = self._controller_dies
        job.controller.downtime_ms = lambda: chance.uniform(5, 500)
        for _ in range(int(8 * self.level)):
            job.world.after(chance.uniform(0, self.horizon_ms), self._something)
        for _ in range(chance.randrange(6)):
            a, b = chance.randrange(job.size), chance.randrange(job.size)
            job.world.after(chance.uniform(0, self.horizon_ms), job.link_appears, a, b)
        for _ in range(chance.randrange(3)):
            job.world.after(chance.uniform(0, self.horizon_ms), self._save)

    @property
    def _is_time(self) -> bool:
        return self.job.world.now_ms < self.horizon_ms

    def _controller_dies(self, number: int, entry: AnyEntry) -> bool:
        return self._is_time and self.job.world.chance.random() < 0.06 * self.level

    def rank_reports(self, process: Process, report: RankReport) -> None:
        if not self._is_time or isinstance(report, Progress | Measured):
            return
        chance = self.job.world.chance
        if isinstance(report, Ready | Armed | Left) and chance.random() < 0.05 * self.level:
            self._caller_appears(process.global_rank)
        odds = 0.06 if isinstance(report, Armed | Cast | Left | Stayed) else 0.015
        if chance.random() < odds * self.level:
            self._at_step(process)

    def _caller_appears(self, global_rank: int) -> None:
        """A rank of some machine, which may be cut off, is about to call this one for the first time."""
        chance, job = self.job.world.chance, self.job
        caller = chance.randrange(job.size)
        if chance.random() < 0.3:
            holder = job.holder(caller)
            if holder is not None:
                holder.machine.partition(chance.uniform(100, 1_500))
        job.world.after(chance.uniform(0, 300), job.link_appears, caller, global_rank)

    def verdict_goes(self, transfer: Transfer) -> None:
        if self._is_time and self.job.world.chance.random() < 0.03 * self.level:
            self.job.world.say("a transfer's connection is cut with the verdict in it")
            self.job.transfers.cut(transfer)

    def _at_step(self, process: Process) -> None:
        chance, job = self.job.world.chance, self.job
        what = chance.choices(("controller", "cut", "partition", "joiner", "link", "die"), (3, 3, 2, 4, 2, 4))[0]
        if what == "controller":
            job.controller.crash()
        elif what == "cut":
            process.machine.disconnect()
        elif what == "partition":
            process.machine.partition(chance.uniform(20, 1_500))
        elif what == "link":
            any(other.alive and other.prepared_link_breaks() for other in job.processes)
        elif what == "joiner":
            joiners = [p for p in job.processes if p.alive and isinstance(p.core.half, Joiner)]
            if joiners:
                self._kill(chance.choice(joiners))
        elif self._may_die(process):
            self._kill(process)

    def _may_die(self, process: Process) -> bool:
        half = process.core.half
        joins = isinstance(half, Joiner) and half.state is not JoinerState.LIVE
        return joins or self.job.world.chance.random() < self.deaths * 0.3

    def _kill(self, process: Process) -> None:
        if self.job.world.chance.random() < 0.5:
            self.job.world.say(f"{process.name} is killed")
            process.end(-9, "killed")
        else:
            self._crash(process.machine.machine_id)

    def _crash(self, machine_id: str) -> None:
        machine = self.job.machines[machine_id]
        machine.crash()
        self.job.world.after(self.job.world.between(30, 800), machine.boot)

    def _save(self) -> None:
        until_ms = self.job.world.now_ms + self.job.world.between(10, 300)
        for rank in range(self.job.size):
            self.job.saves[rank] = until_ms

    def _something(self) -> None:
        """One fault at a moment in time."""
        job, chance = self.job, self.job.world.chance
        machine = job.machines[chance.choice(sorted(job.machines))]
        what = chance.choices(_KINDS, _ODDS)[0]
        if what == "controller":
            job.controller.crash()
        elif what == "cut":
            machine.disconnect()
        elif what == "partition":
            machine.partition(chance.uniform(20, 1_500))
        elif what == "transfer":
            self._cut_transfer()
        elif what == "link":
            any(process.alive and process.prepared_link_breaks() for process in job.processes)
        elif what == "user":
            self._ask_twice()
        elif what == "crash" and all(self._may_die(process) for process in machine.processes.values()):
            self._crash(machine.machine_id)
        elif what == "kill":
            for process in machine.processes.values():
                if process.alive and self._may_die(process):
                    self._kill(process)
                    return

    def _ask_twice(self) -> None:
        """The same command again, from another client, or from one that lost its connection."""
        asked = list(self.job.users.asked.values())
        if asked:
            again = self.job.world.chance.choice(asked).migrate
            self.job.users.migrate(*again.leavers, to=again.to, command_id=again.command_id)

    def _cut_transfer(self) -> None:
        live = [transfer for transfer in self.job.transfers.known.values() if not transfer.is_cut and transfer.taker]
        if live:
            self.job.world.say("a transfer's connection is cut")
            self.job.transfers.cut(live[-1])
