"""Two ranks in two network namespaces, joined by a cable that is pulled. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.collectives import runner
from tests.distributed.collectives.calls import LARGE, Outcome, all_reduce, receive, try_call
from tests.distributed.collectives.ranks import Ranks, environments
from tests.distributed.collectives.schedules import Layout

pytestmark = pytest.mark.distributed

SILENCE_MS = 1500
LIMIT_S = 5.0

NETWORK = "10.231.77."


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces, joined by a cable."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip, of iproute2")
    names = [f"trainmover-{os.getpid()}-{side}" for side in range(2)]
    cables = [f"tm{os.getpid() % 100000}-{side}" for side in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip(
                "link",
                "add",
                cables[0],
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                cables[1],
                "netns",
                names[1],
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"may not make network namespaces here: {error.stderr.decode().strip()}")
        for side, (name, cable) in enumerate(zip(names, cables, strict=True)):
            ip("-n", name, "addr", "add", f"{NETWORK}{side + 1}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
        yield [f"{name}/{cable}" for name, cable in zip(names, cables, strict=True)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10, check=False)


def enter_network(name: str) -> None:
    import ctypes

    with Path(f"/run/netns/{name}").open() as namespace:
        assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000) == 0  # CLONE_NEWNET


@pytest.mark.parametrize("count", [10, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("blocked", [True, False], ids=["in a call", "in many calls"])
def test_a_cut_link_is_noticed_within_the_limit(
    count: int, blocked: bool, namespaces: list[str], tmp_path: Path
) -> None:
    names, cables = zip(*(place.split("/") for place in namespaces), strict=True)
    settings = environments("shm", 2, TRAINMOVER_PEER_TIMEOUT_MS=str(SILENCE_MS))
    for side, environment in enumerate(settings):
        environment["TRAINMOVER_BIND_ADDRESS"] = f"{NETWORK}{side + 1}"
    layout = Layout(size=2, groups=((0, 1),))
    with Ranks(settings, tmp_path / "logs") as ranks:
        ranks.run(enter_network, [(name,) for name in names])
        ranks.run(runner.join, [(layout, rank, tmp_path / "store") for rank in range(2)])
        ranks.run(all_reduce, [(0, count)] * 2)
        if blocked:
            for rank, other in ((0, 1), (1, 0)):
                ranks[rank].start(try_call, receive, 0, other)
        else:
            for rank in (0, 1):
                ranks[rank].start(try_call, all_reduce, 0, count, 10_000_000)
            time.sleep(0.2)  # some calls go by
        cut_at = time.monotonic()
        ip("-n", names[0], "link", "set", cables[0], "down")
        outcomes: list[Outcome] = [rank.result(SILENCE_MS / 1000 + LIMIT_S) for rank in ranks]
        print([f"{outcome.error} after {outcome.at - cut_at:.2f} s" for outcome in outcomes])
        for outcome in outcomes:
            assert outcome.error in ("CollectiveTimeout", "PeerLost")
            assert outcome.at - cut_at < SILENCE_MS / 1000 + LIMIT_S
