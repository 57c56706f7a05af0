"""What a joiner needs beside the state is made before the leaver hears that it has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from megatron.resilience.state.errors import TransferRefused
from megatron.resilience.state.inventory import take_inventory
from megatron.resilience.state.state_client import StateClient
from megatron.resilience.state.state_server import StateServer
from megatron.resilience.state.transfer import Verdict
from tests.unit.resilience.state.handover import IDENTITY, LIMITS, Elsewhere
from tests.unit.resilience.state.test_inventory import Counters

LoneRank = Callable[[str], AbstractContextManager[Any]]


def joining(rank: Any, prepare: Callable[[], None]) -> Any:
    from megatron.training.joining import ReadyInventory

    return ReadyInventory(inventory=take_inventory(rank.trainee, Counters()), prepare=prepare)


def test_the_state_is_acknowledged_once_all_is_made(lone_rank: LoneRank) -> None:
    with lone_rank("") as rank, StateServer(IDENTITY, limits=LIMITS) as server:
        acknowledged: list[bool] = []
        own = joining(rank, lambda: acknowledged.append(server._is_acknowledged))
        client = StateClient(IDENTITY, server.listen(), limits=LIMITS)
        taking = Elsewhere(lambda: (client.receive_state(own), client.receive_verdict()))
        server.send_state(own)
        assert acknowledged == [False]
        assert server.send_verdict(Verdict.LEAVE)
        assert taking.result()[1] is Verdict.LEAVE
        client.close()


def test_what_cannot_be_made_keeps_the_leaver(lone_rank: LoneRank) -> None:
    def no_memory() -> None:
        raise OSError("no process can be made")

    with lone_rank("") as rank, StateServer(IDENTITY, limits=LIMITS) as server:
        own = joining(rank, no_memory)
        client = StateClient(IDENTITY, server.listen(), limits=LIMITS)
        taking = Elsewhere(lambda: client.receive_state(own))
        with pytest.raises(TransferRefused, match="cannot train on from there: OSError: no process can be made"):
            server.send_state(own)
        with pytest.raises(TransferRefused, match="does not fit this rank"):
            taking.result()
        client.close()


def test_loaders_are_made_where_the_state_says_and_used(lone_rank: LoneRank) -> None:
    with lone_rank("--train-iters 8") as rank:
        from megatron.training.checkpointing import Checkpointer, Progress
        from megatron.training.config import RunSettings
        from megatron.training.data import build_gpt_datasets, dataset_sizes
        from megatron.training.ending import EndingWatch
        from megatron.training.loop import Datasets, TrainingLoop
        from megatron.training.membership import FixedMembership
        from megatron.training.reporting import Reporter
        from pretrain_gpt import forward_step

        train, valid, test = build_gpt_datasets(rank.plan, dataset_sizes(rank.plan))
        made: list[int] = []

        class Watched:
            """The training set; notes where loaders begin, by the first sample that each asks for."""

            def __len__(self) -> int:
                return len(train)

            def __getitem__(self, index: int) -> Any:
                made.append(index)
                return train[index]

        datasets = Datasets(train=Watched(), valid=valid, test=test)
        parts = (forward_step, Checkpointer(rank.plan), Reporter(rank.plan, speaks=False))
        loop = TrainingLoop(rank.plan, rank.trainee, datasets, *parts)
        progress, membership = Progress(), FixedMembership(EndingWatch(RunSettings(exit_interval=5)))
        loop.prepare(progress)
        stale = loop._prepared
        progress.iteration, progress.consumed_train_samples = 4, 8
        loop.prepare(progress)
        assert loop._prepared is not None
        assert loop._prepared is not stale
        ours = loop._prepared[1][0]
        assert made == []
        loop.run(progress, membership)
        assert made == [8, 9]
        assert ours.next_batch().tokens is not None
        assert made == [8, 9, 10]
