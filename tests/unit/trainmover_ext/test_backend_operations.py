"""Every operation between real processes, against what it must give. The checks are in operations.py.

One job for each number of ranks and transport runs them all; each check is a test of its own.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("run_operations.py")
NAMES = [
    node.name
    for node in ast.parse(PROGRAM.with_name("operations.py").read_text()).body
    if isinstance(node, ast.FunctionDef)
    and any(isinstance(mark, ast.Name) and mark.id == "check" for mark in node.decorator_list)
]
JOBS = [(2, "auto"), (3, "auto"), (3, "tcp"), (4, "auto")]
TIMEOUT_S = 240


def marks_of(job: tuple[int, str]) -> list[pytest.MarkDecorator]:
    """Two ranks and four show little that three do not."""
    return [] if job[0] == 3 else [pytest.mark.nightly]


Results = list[dict[str, str]]


@pytest.fixture(
    scope="module", params=[pytest.param(job, id=f"{job[0]} ranks, {job[1]}", marks=marks_of(job)) for job in JOBS]
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank of a job found."""
    ranks, transport = request.param
    folder = tmp_path_factory.mktemp("job")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINMOVER_")}
    environment |= {"TRAINMOVER_TRANSPORT": transport, "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    outputs = [(folder / f"output{rank}").open("w+") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(ranks), str(folder / "store"), str(folder / f"found{rank}")],
            env=environment,
            stdout=outputs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass  # told below, with what the ranks wrote
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found: Results = []
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        output.seek(0)
        text = output.read()
        output.close()
        assert process.returncode == 0, f"rank {rank} of {ranks} ended with {process.returncode}:\n{text[-3000:]}"
        found.append(json.loads((folder / f"found{rank}").read_text()))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*NAMES, "anew"])
def test_operation(results: Results, name: str) -> None:
    for rank, found in enumerate(results):
        assert found[name] == "ok", f"rank {rank}: {found[name]}"


def test_the_checks_are_found() -> None:
    assert len(NAMES) > 20
