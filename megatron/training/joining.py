"""Builds a rank that is to take the place of a running one: same model, groups, optimizer and data, and nobody else.

Called on the joiner's machine while the job trains on. The data plane is in mode `isolated` (TRAINMOVER_MODE), in which
every operation returns at once; the rank's values are arbitrary until it has received the state of the rank before it
(megatron.resilience.state). It reads no checkpoint, opens no log, and writes nothing but missing indices of its data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.resilience.state.errors import StateError
from megatron.resilience.state.inventory import Inventory, take_inventory
from megatron.resilience.worker.handover import Handover
from megatron.training import device
from megatron.training.bookkeeping import LoopBookkeeping
from megatron.training.checkpointing import Checkpointer, Progress
from megatron.training.config import SettingsError
from megatron.training.data import DatasetsProvider, dataset_sizes
from megatron.training.ending import EndingWatch
from megatron.training.environment import Environment
from megatron.training.initialize import join_job
from megatron.training.layout import Plan
from megatron.training.loop import Datasets
from megatron.training.model_setup import ModelProvider, Trainee, build_trainee
from megatron.training.preflight import plan_run
from megatron.training.reporting import Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """All that a rank needs to train on, once `inventory` has been received. `reporter` and `watch` are not started."""

    plan: Plan
    trainee: Trainee
    datasets: Datasets
    reporter: Reporter
    checkpointer: Checkpointer
    watch: EndingWatch
    progress: Progress
    inventory: Inventory
    handover: Handover


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyInventory:
    """An inventory that is restored only when `prepare` has also done what it does with the state.

    The leaver hears of the state's arrival after that: what fails in `prepare` ends the switch and not the job.
    """

    inventory: Inventory
    prepare: Callable[[], None]

    @property
    def total_bytes(self) -> int:
        """Of all arenas together."""
        return self.inventory.total_bytes

    def layout_digest(self) -> bytes:
        """See Inventory."""
        return self.inventory.layout_digest()

    def scratch(self) -> list[torch.Tensor]:
        """See Inventory."""
        return self.inventory.scratch()

    def memory(self) -> list[memoryview]:
        """See Inventory."""
        return self.inventory.memory()

    def capture(self) -> bytes:
        """See Inventory."""
        return self.inventory.capture()

    def restore(self, payload: bytes) -> None:
        """See Inventory. Raises StateError for whatever `prepare` raises."""
        self.inventory.restore(payload)
        try:
            self.prepare()
        except Exception as error:
            raise StateError(f"it cannot train on from there: {type(error).__name__}: {error}") from error


def build_joiner(
    argv: Sequence[str],
    environment: Environment,
    *,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
) -> Joiner:
    """The rank `environment` names, built alone. `argv` is the job's. Raises SettingsError as `pretrain()` would.

    In about the time of a normal start, less the waiting for others; blocks on nothing outside this process but the
    files of the data, and on the ranks beside it where indices of the data have to be made.
    """
    plan, _ = plan_run(argv, world_size=environment.world_size, on_cuda=device.on_cuda(), joins=True)
    _require_isolation(plan)
    join_job(plan, environment)
    reporter = Reporter(plan, speaks=environment.global_rank == environment.world_size - 1)
    trainee = build_trainee(plan, model_provider)
    train, valid, test = datasets_provider(plan, dataset_sizes(plan))
    checkpointer, watch, progress = Checkpointer(plan), EndingWatch(plan.settings.run, joins=True), Progress()
    handover = Handover(generation=environment.join_generation)
    bookkeeping = LoopBookkeeping(
        progress=progress, reporter=reporter, checkpointer=checkpointer, watch=watch, links=handover
    )
    return Joiner(
        plan=plan,
        trainee=trainee,
        datasets=Datasets(train=train, valid=valid, test=test),
        reporter=reporter,
        checkpointer=checkpointer,
        watch=watch,
        progress=progress,
        inventory=take_inventory(trainee, bookkeeping),
        handover=handover,
    )


def _require_isolation(plan: Plan) -> None:
    if plan.backend != "trainmover":
        raise SettingsError(
            f"found --distributed-backend {plan.backend}, expected trainmover: with others no rank can be built alone"
        )
    from trainmover_ext.settings import read_settings

    if not read_settings().isolated:
        raise SettingsError(
            "TRAINMOVER_MODE is live, expected isolated: this rank would wait for ranks that never come"
        )
