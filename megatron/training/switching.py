"""Connects a rank to its machine's agent, so that another can take its place, or that it takes another's.

Called by `pretrain()` where an agent is there; without one nothing of this is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from megatron.resilience.protocol.facts import Facts
from megatron.resilience.state.inventory import Inventory, take_inventory
from megatron.resilience.worker.agent_link import AgentLink, LinkIdentity
from megatron.resilience.worker.facts import local_facts
from megatron.resilience.worker.handover import Handover
from megatron.resilience.worker.limits import SwitchLimits
from megatron.resilience.worker.rank_worker import Place, RankWorker
from megatron.resilience.worker.room import MeasuringLine
from megatron.training.bookkeeping import LoopBookkeeping
from megatron.training.checkpointing import Checkpointer, Progress
from megatron.training.config import SettingsError
from megatron.training.ending import EndingWatch
from megatron.training.environment import Environment
from megatron.training.joining import ReadyInventory
from megatron.training.layout import Plan
from megatron.training.membership import SwitchedMembership
from megatron.training.model_setup import Trainee
from megatron.training.reporting import Reporter
from megatron.training.run_facts import data_facts, script_fact, setting_facts
from megatron.training.vote_group import VoteGroup
from trainmover_ext.settings import read_settings


def check_switchable(plan: Plan) -> None:
    """Raises SettingsError for what no switch could carry."""
    if plan.backend != "trainmover":
        raise SettingsError(
            f"found --distributed-backend {plan.backend} under an agent, expected trainmover: links of others can't be "
            "switched; leave the flag out, or --resilience of trainmover run"
        )
    if plan.settings.checkpoint.ckpt_assume_constant_structure:
        raise SettingsError(
            "--ckpt-assume-constant-structure under an agent: ranks keep the plan of their first save, and a rank that "
            "joins has none; leave it out"
        )


@contextmanager
def member(
    plan: Plan,
    environment: Environment,
    watch: EndingWatch,
    trainee: Trainee,
    progress: Progress,
    reporter: Reporter,
    checkpointer: Checkpointer,
) -> Iterator[SwitchedMembership]:
    """Takes part from the start: everything is built and loaded."""
    handover = Handover()
    bookkeeping = LoopBookkeeping(
        progress=progress, reporter=reporter, checkpointer=checkpointer, watch=watch, links=handover
    )
    inventory = take_inventory(trainee, bookkeeping)
    with _worker(plan, environment, inventory, handover) as worker:
        worker.start(_facts(plan))
        yield SwitchedMembership(watch, worker, handover.meter)


@contextmanager
def successor(
    plan: Plan,
    environment: Environment,
    watch: EndingWatch,
    inventory: ReadyInventory,
    handover: Handover,
) -> Iterator[SwitchedMembership]:
    """Takes the place of a running rank: returns when its state is here and it may train on.

    Raises SlotMoved when the switch that it was started for is off.
    """
    with _worker(plan, environment, inventory, handover) as worker:
        worker.join(_facts(plan))
        yield SwitchedMembership(watch, worker, handover.meter)


def _facts(plan: Plan) -> Facts:
    settings, digest = setting_facts(plan)
    return local_facts(settings=settings, model_digest=digest, data=data_facts(plan), script=script_fact())


@contextmanager
def _worker(
    plan: Plan, environment: Environment, inventory: Inventory | ReadyInventory, handover: Handover
) -> Iterator[RankWorker]:
    settings = read_settings()
    if settings.token is None:
        raise SettingsError("TRAINMOVER_AGENT is set and TRAINMOVER_TOKEN is not; start by trainmover run --resilience")
    generation = environment.join_generation
    identity = LinkIdentity(
        token=settings.token, global_rank=environment.global_rank, generation=1 if generation is None else generation
    )
    link = AgentLink(environment.agent, identity)
    link.start()
    place = Place(
        global_rank=environment.global_rank,
        job=settings.job_id,
        token=settings.token,
        bind_address=settings.bind_address,
        generation=generation,
        counts_tensors=environment.counts_tensors,
    )
    timeout = timedelta(minutes=plan.settings.parallel.distributed_timeout_minutes)
    votes = VoteGroup(environment.global_rank, environment.world_size, timeout=timeout)
    limits = SwitchLimits.within(timeout.total_seconds())
    line = MeasuringLine(link)
    worker = RankWorker(place, line, inventory=inventory, handover=handover, all_reduce=votes.all_reduce, limits=limits)
    link.at_once = worker.hear
    try:
        yield worker
    finally:
        worker.close()
        votes.close()
        link.close()
