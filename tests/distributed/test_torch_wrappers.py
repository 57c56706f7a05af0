"""The backend under torch's own wrappers and launcher, without Megatron: DDP and FSDP2, started by torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "wrapped_model.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


@pytest.fixture(scope="module", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torchrun leaves a folder of logs where temporary files are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("torchrun")))
        yield


def losses(command: list[str], **environment: str) -> list[float]:
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float.fromhex(text) for text in re.findall(r"loss (\S+)", done.stdout)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return losses([sys.executable, str(SCRIPT), "none"])


@pytest.mark.distributed
@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_wrapper_trains_as_one_process_would_and_repeats_in_every_bit(wrapper: str, alone: list[float]) -> None:
    shared = losses([*TORCHRUN, str(SCRIPT), wrapper])
    over_tcp = losses([*TORCHRUN, str(SCRIPT), wrapper], TRAINMOVER_TRANSPORT="tcp")
    assert len(shared) == 12
    assert shared == pytest.approx(alone, rel=1e-5)
    assert shared == over_tcp


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "no rank could be built alone"),
        pytest.param("TORCH_DIST_INIT_BARRIER", "1", "joins", marks=pytest.mark.nightly),
    ],
)
def test_settings_that_would_keep_a_joiner_out_are_refused_with_the_reason(
    variable: str, value: str, reason: str
) -> None:
    done = subprocess.run(
        [*TORCHRUN, str(SCRIPT), "ddp"],
        env={**os.environ, "OMP_NUM_THREADS": "1", variable: value},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert re.search(rf"ValueError: {variable} .*{reason}", done.stderr), done.stderr[-3000:]
