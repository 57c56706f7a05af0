"""State transfer in the simulation: one connection between a leaver rank and the joiner rank of the same number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.resilience.protocol.switch import LinkBroke, TransferAcked, TransferFailed, TransferWhole, VerdictCame

if TYPE_CHECKING:
    from tests.sim.job import Job
    from tests.sim.process import Process


@dataclass(eq=False)
class Transfer:
    """Of one rank in one generation."""

    generation: int
    giver: Process
    taker: Process | None = None
    gives: bool = False
    is_cut: bool = False
    under_way: bool = False
    closed: bool = False


class Transfers:
    """All transfers, by the address at which the leaver rank listens."""

    def __init__(self, job: Job) -> None:
        self.job, self.world = job, job.world
        self.known: dict[tuple[str, int], Transfer] = {}

    def listens(self, giver: Process, generation: int) -> None:
        self.known[giver.endpoint, generation] = Transfer(generation=generation, giver=giver)

    def fetches(self, taker: Process, generation: int, address: str) -> None:
        def connect() -> None:
            transfer = self.known.get((address, generation))
            if transfer is None or transfer.closed or not transfer.giver.alive:
                taker.feed(LinkBroke(generation=generation, why=f"nobody gives state at {address}"))
                return
            transfer.taker, transfer.is_cut = taker, False
            self._flow(transfer)

        self.world.after(self.world.between(0.5, 5), connect)

    def gives(self, giver: Process, generation: int) -> None:
        transfer = self.known[giver.endpoint, generation]
        transfer.gives = True
        self._flow(transfer)

    def _flow(self, transfer: Transfer) -> None:
        """Starts once one side gives and the other is there."""
        if not transfer.gives or transfer.taker is None or transfer.under_way or transfer.is_cut:
            return
        transfer.under_way = True
        self.world.after(self.world.between(2, 30), self._arrive, transfer, transfer.taker)

    def _arrive(self, transfer: Transfer, taker: Process | None) -> None:
        if taker is None or transfer.is_cut or not taker.alive or not transfer.giver.alive or transfer.closed:
            return
        taker.state = transfer.giver.state
        taker.feed(TransferWhole(generation=transfer.generation))

        def acknowledge() -> None:
            if not transfer.is_cut and transfer.giver.alive:
                transfer.giver.feed(TransferAcked(generation=transfer.generation))

        self.world.after(self.world.between(0.2, 4), acknowledge)

    def verdict(self, giver: Process, generation: int, leave: bool) -> None:
        """The last frame; lost if the connection is."""
        self.job.verdict(giver, generation, leave=leave)
        transfer = self.known.get((giver.endpoint, generation))
        if transfer is None:
            return
        transfer.closed = True
        self.job.faults.verdict_goes(transfer)

        def arrive() -> None:
            if transfer.taker is not None and transfer.taker.alive and not transfer.is_cut:
                self.world.say(f"{transfer.taker.name} <- last frame: {'LEAVE' if leave else 'STAY'}")
                transfer.taker.feed(VerdictCame(generation=generation, leave=leave))

        self.world.after(self.world.between(0.2, 4), arrive)

    def close(self, giver: Process, generation: int) -> None:
        transfer = self.known.pop((giver.endpoint, generation), None)
        if transfer is not None:
            self.cut(transfer)

    def cut(self, transfer: Transfer) -> None:
        """The connection breaks for good: each side notices in its time."""
        if transfer.is_cut:
            return
        transfer.is_cut = transfer.closed = True
        generation = transfer.generation
        why = "the transfer's connection is lost"
        for process in (transfer.giver, transfer.taker):
            if process is not None:
                event = TransferFailed(generation=generation, why=why)
                self.world.after(self.world.between(0.2, 8), self._notice, process, event)

    def _notice(self, process: Process, event: TransferFailed) -> None:
        if process.alive and process.core.switch_generation == event.generation:
            process.feed(event)

    def process_ended(self, process: Process) -> None:
        for transfer in self.known.values():
            if process is transfer.giver or process is transfer.taker:
                self.cut(transfer)
