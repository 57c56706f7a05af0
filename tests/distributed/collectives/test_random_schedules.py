"""A thousand random schedules on 2 to 8 ranks, over every way a message can travel: each result is right to the bit.

Seeds come in chunks that share a job. A failure names seed and call; its chunk runs alone with, for instance,
pytest tests/distributed/collectives/test_random_schedules.py -k "tcp and 400".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.collectives import runner
from tests.distributed.collectives.ranks import Ranks, environments
from tests.distributed.collectives.schedules import layout_of

pytestmark = pytest.mark.distributed

RANKS = 8
CHUNK = 25
SEEDS = {
    "shm": range(0, 400, CHUNK),
    "tcp": range(400, 650, CHUNK),
    "machines": range(650, 900, CHUNK),
    "no-cross-memory": range(900, 1000, CHUNK),
}
NIGHTLY_SEEDS = 20_000


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ranks]]:
    """Ranks by transport, used again by all its chunks; one transport at a time."""
    made: dict[str, Ranks] = {}
    yield made
    for ranks in made.values():
        ranks.close()


def ranks_for(transport: str, pools: dict[str, Ranks], folder: Path) -> Ranks:
    if transport not in pools:
        for other in list(pools):
            pools.pop(other).close()
        pools[transport] = Ranks(environments(transport, RANKS), folder)
    return pools[transport]


def check_chunk(transport: str, first: int, count: int, pools: dict[str, Ranks], folder: Path) -> None:
    ranks = ranks_for(transport, pools, folder / "logs")
    layout = layout_of(first)
    try:
        ranks.run(runner.join, [(layout, rank, folder / "store") for rank in range(layout.size)])
        checked = ranks.run(runner.run_schedules, [(first, count)] * layout.size, limit_s=120)
        ranks.run(runner.leave, [()] * layout.size)
    except BaseException:
        pools.pop(transport).close()  # what state it is in nobody knows
        raise
    assert sum(checked) > 0


@pytest.mark.parametrize(("transport", "first"), [(name, first) for name, seeds in SEEDS.items() for first in seeds])
def test_every_result_is_right_to_the_bit(transport: str, first: int, pools: dict[str, Ranks], tmp_path: Path) -> None:
    check_chunk(transport, first, CHUNK, pools, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("transport", SEEDS)
def test_many_more_are_too(transport: str, pools: dict[str, Ranks], tmp_path: Path) -> None:
    for first in range(1000, 1000 + NIGHTLY_SEEDS // len(SEEDS), CHUNK):
        folder = tmp_path / str(first)
        folder.mkdir()
        check_chunk(transport, first, CHUNK, pools, folder)
