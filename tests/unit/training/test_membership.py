"""What the loop asks each iteration: nothing for a fixed job, one vote with the ending in it for a switched one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from megatron.resilience.protocol.vote import Contribution
from megatron.resilience.state.errors import StateError
from megatron.resilience.worker.meter import Meter
from megatron.training import preload  # noqa: F401  (device and patches first)
from megatron.training.checkpointing import Checkpointer, Progress
from megatron.training.config import RunSettings
from megatron.training.data import build_gpt_datasets, dataset_sizes
from megatron.training.ending import Ending, EndingWatch
from megatron.training.layout import Plan
from megatron.training.loop import Datasets, TrainingLoop
from megatron.training.membership import FixedMembership, SwitchedMembership
from megatron.training.preflight import plan_run
from megatron.training.reporting import Reporter
from pretrain_gpt import forward_step

TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 8 --seq-length 8 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 63 "
    "--tokenizer-type NullTokenizer"
)


def plan(flags: str) -> Plan:
    return plan_run([*TINY.split(), *flags.split()], world_size=1, on_cuda=False)[0]


class Worker:
    """Stands for the rank's part in switches; another rank's `ending` comes out of its vote."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        self.calls: list[tuple[Any, ...]] = []

    def reach_boundary(self, iteration: int) -> None:
        self.calls.append(("boundary", iteration))

    def vote(self, iteration: int, *, obstacles: tuple[str, ...], exits: int) -> Contribution:
        self.calls.append(("vote", iteration, obstacles, exits))
        return Contribution(cast=0, veto=0, exit=max(exits, int(self.ending)))


def switched(worker: Worker, meter: Meter | None = None, **settings: Any) -> SwitchedMembership:
    return SwitchedMembership(EndingWatch(RunSettings(**settings)), cast("Any", worker), meter or Meter())


def test_a_fixed_job_ends_as_its_watch_says() -> None:
    membership = FixedMembership(EndingWatch(RunSettings(exit_interval=3)))
    seen = []
    for iteration in (1, 2, 3):
        membership.reach_boundary(iteration)
        membership.vote(iteration, ())
        seen.append(membership.ending(iteration))
    assert seen == [Ending.GOES_ON, Ending.GOES_ON, Ending.INTERVAL_REACHED]


def test_a_switched_job_tells_boundary_obstacles_and_ending() -> None:
    worker = Worker(Ending.GOES_ON)
    membership = switched(worker, exit_interval=2)
    endings = []
    for iteration in (1, 2):
        membership.reach_boundary(iteration)
        membership.vote(iteration, ("a save",))
        endings.append(membership.ending(iteration))
    assert worker.calls == [
        ("boundary", 1),
        ("vote", 1, ("a save",), 0),
        ("boundary", 2),
        ("vote", 2, ("a save",), int(Ending.INTERVAL_REACHED)),
    ]
    assert endings == [Ending.GOES_ON, Ending.INTERVAL_REACHED]


def test_a_switched_job_leaves_pauses_out_of_an_iterations_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("megatron.training.membership.time.monotonic", lambda: now_s[0])
    meter = Meter()
    membership = switched(Worker(Ending.GOES_ON), meter)
    meter.arrive(1, now_s[0])
    with membership.paused():
        now_s[0] += 30.0
    now_s[0] += 0.5
    meter.arrive(2, now_s[0])
    assert meter.median_ms() == pytest.approx(500.0)


def test_the_loop_pauses_for_evaluations_and_saves_and_nothing_else(
    lone_rank: Callable[[str], AbstractContextManager[Any]], tmp_path: Path
) -> None:
    done: list[str] = []

    class Watching(FixedMembership):
        @contextmanager
        def paused(self) -> Iterator[None]:
            done.append("pause")
            yield
            done.append("go on")

    class Speaking(Reporter):
        def step(self, *_: Any) -> None:
            done.append("step")

        def evaluation(self, *_: Any) -> None:
            done.append("evaluation")

        def say(self, text: str) -> None:
            done.append(text.split()[0])

    with lone_rank(f"--eval-interval 2 --eval-iters 1 --save {tmp_path} --save-interval 2 --exit-interval 3") as rank:
        data = build_gpt_datasets(rank.plan, dataset_sizes(rank.plan))
        datasets = Datasets(**dict(zip(("train", "valid", "test"), data, strict=True)))
        reporter = Speaking(rank.plan, speaks=True)
        loop = TrainingLoop(rank.plan, rank.trainee, datasets, forward_step, Checkpointer(rank.plan), reporter)
        loop.run(Progress(), Watching(EndingWatch(rank.plan.settings.run)))
    turns = ["step", "pause", "go on", "step", "pause", "evaluation", "checkpoint", "go on", "step", "pause", "go on"]
    assert done == [*turns, "checkpoint"], "the last save is after the last iteration"


def test_another_ranks_ending_ends_this_one() -> None:
    membership = switched(Worker(Ending.SIGNAL_CAME))
    membership.vote(1, ())
    assert membership.ending(1) is Ending.SIGNAL_CAME


def vetoes(flags: str, *, iteration: int) -> tuple[str, ...]:
    """Of the loop in the iteration after `iteration`."""
    settings = plan(flags)
    unused = cast("Any", None)
    loop = TrainingLoop(settings, unused, unused, unused, Checkpointer(settings), unused)
    return loop._obstacles(Progress(iteration=iteration))


@pytest.mark.parametrize(
    ("flags", "iteration", "expected"),
    [
        ("", 3, ()),
        ("--save {save} --save-interval 4", 3, ()),
        ("--save {save} --save-interval 4 --async-save", 2, ()),
        ("--save {save} --save-interval 4 --async-save", 3, ("a background save begins",)),
        ("", 9, ("the last iteration",)),
    ],
)
def test_no_machine_moves_at_a_boundary_that_a_save_would_cross(
    flags: str, iteration: int, expected: tuple[str, ...], tmp_path: Path
) -> None:
    assert vetoes(flags.format(save=tmp_path), iteration=iteration) == expected


def test_a_rank_is_not_given_away_while_a_background_save_runs(tmp_path: Path) -> None:
    checkpointer = Checkpointer(plan(f"--save {tmp_path} --save-interval 4 --async-save"))
    assert checkpointer.capture()["background_saves"] == -1
    checkpointer._background.async_calls.append(cast("Any", None))
    with pytest.raises(StateError, match="a background save is not finished"):
        checkpointer.capture()
