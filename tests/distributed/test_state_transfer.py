"""A rank's state goes over whole: a process built alone becomes that rank, and a job of heirs trains on bit-equal.

For each case a job trains to a boundary and hands each rank's state over twice: to a process built alone, compared in
every bit there, and to a rank of a second job, which trains on. Were anything missing from the state (a random state, a
loss scale, a count of the first iteration), the second job's losses or its final state would differ from the first's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import ROOT
from tests.distributed.test_bit_equality import INTERLEAVED, MOE, TINY, TP2_PP2

BASE = TINY.replace("--log-interval 10", "--log-interval 4").replace("--global-batch-size 8", "--global-batch-size 4")
BOUNDARY, ITERATIONS = 3, 6
SMALL_BYTES_MAX = 64 << 10
"""Of a tiny rank's small state: 35 kB in the plain case, mostly random states of 5 kB each."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of state; `lone_ranks` are those whose place is taken by a process built alone."""

    name: str
    world_size: int
    flags: str
    lone_ranks: tuple[int, ...]
    nightly: bool = False


CASES = (
    Case(name="fp32", world_size=4, flags=f"{TP2_PP2} --use-distributed-optimizer", lone_ranks=(0, 3), nightly=True),
    Case(
        name="bf16-sp-overlap-dropout",
        world_size=4,
        flags="--tensor-model-parallel-size 2 --use-distributed-optimizer --bf16 --sequence-parallel "
        "--overlap-grad-reduce --overlap-param-gather --attention-dropout 0.1 --hidden-dropout 0.1 --eval-interval 2 "
        "--eval-iters 1",
        lone_ranks=(0, 3),
    ),
    Case(
        name="bf16-sp-overlap-dropout-pipeline",
        world_size=8,
        nightly=True,
        flags=f"{TP2_PP2} --use-distributed-optimizer --bf16 --sequence-parallel --overlap-grad-reduce "
        "--overlap-param-gather --attention-dropout 0.1 --hidden-dropout 0.1 --eval-interval 2 --eval-iters 1",
        lone_ranks=(0, 3, 5, 6),
    ),
    Case(
        name="fp16",
        world_size=2,
        # A scale that overflows at first, so that it has moved by the boundary, and a window that ends just behind it.
        flags="--use-distributed-optimizer --fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1",
        lone_ranks=(0, 1),
        nightly=True,
    ),
    Case(name="plain-fp32", world_size=2, flags="--pipeline-model-parallel-size 2", lone_ranks=(0, 1)),
    Case(
        name="plain-bf16-sgd",
        world_size=2,
        flags="--tensor-model-parallel-size 2 --bf16 --optimizer sgd",
        lone_ranks=(1,),
        nightly=True,
    ),
    Case(
        name="interleaved-overlap",
        world_size=4,
        flags=f"--pipeline-model-parallel-size 2 {INTERLEAVED} --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather",
        lone_ranks=(1, 2),
        nightly=True,
    ),
    Case(
        name="moe-expert-parallel",
        world_size=4,
        flags=f"{MOE} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer "
        "--moe-token-dispatcher-type allgather",
        lone_ranks=(0, 3),
    ),
    Case(
        name="moe-dense-stage",
        world_size=4,
        flags=f"{MOE} --moe-layer-freq ([1]*2+[0]*2) --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
        "--use-distributed-optimizer --bf16",
        lone_ranks=(0, 3),
        nightly=True,
    ),
    Case(
        name="moe-alltoall-tensor-parallel-plain",
        world_size=4,
        flags=f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall",
        lone_ranks=(0, 1, 2, 3),
        nightly=True,
    ),
)


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "state_jobs.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert process.stdin
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(timeout=30)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What each process of a case wrote, by rank."""

    case: Case
    leavers: list[dict[str, Any]]
    heirs: list[dict[str, Any]]
    lone: dict[int, dict[str, Any]]


PARAMETERS = [pytest.param(case, id=case.name, marks=[pytest.mark.nightly] if case.nightly else []) for case in CASES]


@pytest.fixture(scope="module", params=PARAMETERS)
def outcome(
    request: pytest.FixtureRequest, server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    asked = {
        "argv": [*BASE.split(), *case.flags.split()],
        "world_size": case.world_size,
        "boundary": BOUNDARY,
        "iterations": ITERATIONS,
        "folder": str(folder),
        "lone_ranks": case.lone_ranks,
    }
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    codes = json.loads(server.stdout.readline())["exit_codes"]
    logs = "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in folder.glob("*.log"))
    assert not any(codes), f"{case.name}: exit codes {codes}\n{logs}"

    def of(kind: str, rank: int) -> dict[str, Any]:
        return dict(json.loads((folder / f"{kind}-{rank}.json").read_text()))

    return Outcome(
        case=case,
        leavers=[of("leaver", rank) for rank in range(case.world_size)],
        heirs=[of("heir", rank) for rank in range(case.world_size)],
        lone={rank: of("lone", rank) for rank in case.lone_ranks},
    )


BITS = ("digest", "arenas", "layout", "small")


def test_a_process_built_alone_becomes_the_rank_in_every_bit(outcome: Outcome) -> None:
    for rank, lone in outcome.lone.items():
        leaver = outcome.leavers[rank]
        assert lone["fresh"]["layout"] == leaver["boundary"]["layout"]
        assert lone["fresh"]["digest"] != leaver["boundary"]["digest"], "the test shows nothing"
        for part in BITS:
            assert lone["boundary"][part] == leaver["boundary"][part], f"rank {rank}: {part}"
        assert lone["taken"]["verdict"] == "stay"


def test_giving_its_state_away_changes_nothing_at_the_leaver(outcome: Outcome) -> None:
    for leaver in outcome.leavers:
        assert {part: leaver["after"][part] for part in BITS} == {part: leaver["boundary"][part] for part in BITS}


def test_a_job_of_heirs_trains_on_bit_equal(outcome: Outcome) -> None:
    for leaver, heir in zip(outcome.leavers, outcome.heirs, strict=True):
        assert len(heir["steps"]) == ITERATIONS - BOUNDARY
        assert heir["steps"] == leaver["steps"][BOUNDARY:]
        for part in BITS:
            assert heir["end"][part] == leaver["end"][part], part
        assert heir["taken"]["verdict"] == "leave"


def test_the_inventory_is_complete(outcome: Outcome) -> None:
    for process in (*outcome.leavers, *outcome.heirs, *outcome.lone.values()):
        assert process["boundary"]["unlisted"] == []


def test_neither_side_makes_tensors_of_more_than_the_small_state(outcome: Outcome) -> None:
    for rank, leaver in enumerate(outcome.leavers):
        small = leaver["boundary"]["small_bytes"]
        given = [leaver["heir"], *([leaver["lone"]] if "lone" in leaver else [])]
        taken = [outcome.heirs[rank]["taken"], *([outcome.lone[rank]["taken"]] if rank in outcome.lone else [])]
        for side in (*given, *taken):
            assert side["made"] <= 2 * small, f"rank {rank}"
        assert small <= SMALL_BYTES_MAX, f"rank {rank}: {small}"


def test_the_cases_show_what_they_are_there_for(outcome: Outcome) -> None:
    steps = outcome.leavers[-1]["steps"]
    results = [result for _, _, result in steps]
    assert len({result["losses"]["lm loss"] for result in results}) > 2
    if outcome.case.name == "fp16":
        scales = [result["loss_scale"] for result in results]
        assert any(result["skipped"] for result in results[:BOUNDARY])
        assert not all(result["skipped"] for result in results[:BOUNDARY]), scales
        assert len(set(scales[BOUNDARY:])) > 1, f"the scale does not move after the boundary: {scales}"
