"""Networks of machines on one computer: which subnet is free. Namespaces themselves are shown by whole jobs."""

from __future__ import annotations

import ipaddress
import os

import pytest

from megatron.resilience.cli.network import MACHINES_MAX, Loopback, Namespaces, NetworkError, _free_subnet

ROUTES = """default via 10.0.0.1 dev eth0
10.64.0.0/10 dev eth0 proto kernel scope link src 10.64.0.2
10.128.0.0/9 dev eth1
broadcast 127.255.255.255 dev lo table local
"""


def test_subnet_meets_no_route() -> None:
    with pytest.raises(NetworkError, match="no free network"):
        _free_subnet(ROUTES)
    half = ROUTES.replace("10.128.0.0/9", "10.128.0.0/10")
    for _ in range(50):
        assert _free_subnet(half).subnet_of(ipaddress.IPv4Network("10.192.0.0/10"))
    assert _free_subnet("").prefixlen == 24


def test_loopback_needs_nothing() -> None:
    network = Loopback()
    network.open(4)
    assert (network.address(3), network.prefix(3), network.pids()) == ("127.0.0.1", [], [])
    network.close()


def test_namespaces_are_refused_without_root_or_for_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match="found user 1000, expected root for --isolation netns"):
        Namespaces.check(2)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(NetworkError, match=f"expected at most {MACHINES_MAX}|expected iproute2"):
        Namespaces.check(MACHINES_MAX + 1)
