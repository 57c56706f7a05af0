"""The network between the machines of a job on one computer: loopback, or a namespace for each, joined by a bridge.

With namespaces each machine has an address and a loopback of its own, so that what runs between machines is what runs
between real ones. They have no names: a holder process keeps each, and when the holders end (with the launcher, by the
kernel's hand if need be) namespaces, bridge and links are gone. Needs root. Made by `trainmover run`.
"""

from __future__ import annotations

import ipaddress
import os
import random
import secrets
import shutil
import signal
import subprocess
import time
from typing import Protocol

from megatron.resilience.agent import process_tree

MACHINES_MAX = 200
_TOOLS = ("ip", "nsenter", "unshare")
_TOOL_S = 30.0
_HOLDER_S = 10.0


class NetworkError(Exception):
    """A network that cannot be made here."""


class Network(Protocol):
    """Where machines are, and how a process is started there."""

    def open(self, machines: int) -> None:
        """Makes it. Raises NetworkError."""

    def address(self, machine: int) -> str:
        """Of a machine."""

    @property
    def host_address(self) -> str:
        """Of the launcher and its controller, as machines reach it."""

    def prefix(self, machine: int) -> list[str]:
        """What goes before the command line of a process of a machine."""

    def pids(self) -> list[int]:
        """Processes that hold it."""

    def close(self) -> None:
        """Takes it down. Idempotent."""


class Loopback:
    """All machines on 127.0.0.1."""

    host_address = "127.0.0.1"

    def open(self, machines: int) -> None:
        """Nothing to make."""

    def address(self, machine: int) -> str:
        """The same for all."""
        return self.host_address

    def prefix(self, machine: int) -> list[str]:
        """Nothing."""
        return []

    def pids(self) -> list[int]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing to take down."""


class Namespaces:
    """See the module."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._subnet = ipaddress.IPv4Network("10.0.0.0/24")

    def open(self, machines: int) -> None:
        """Makes namespaces, bridge and links. Raises NetworkError."""
        self.check(machines)
        try:
            self._subnet = _free_subnet(_run(["ip", "-4", "-o", "route", "show", "table", "all"]))
            self._holders = [_hold() for _ in range(machines + 1)]
            for holder in self._holders:
                _wait_for_namespace(holder)
            self._connect(machines)
        except (NetworkError, OSError):
            self.close()
            raise

    @staticmethod
    def check(machines: int) -> None:
        """Raises NetworkError if this computer or user cannot have namespaces."""
        if os.geteuid() != 0:
            raise NetworkError(
                f"found user {os.geteuid()}, expected root for --isolation netns; run as root, or leave it out"
            )
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise NetworkError(f"found no {', '.join(missing)}, expected iproute2 and util-linux; install them")
        if machines > MACHINES_MAX:
            raise NetworkError(f"found {machines} machines, expected at most {MACHINES_MAX} with --isolation netns")

    def address(self, machine: int) -> str:
        """Of a machine."""
        return str(self._subnet[machine + 2])

    @property
    def host_address(self) -> str:
        """Of the launcher's end of the bridge."""
        return str(self._subnet[1])

    def prefix(self, machine: int) -> list[str]:
        """Enters the machine's namespace."""
        return _enter(self._holders[machine + 1])

    def pids(self) -> list[int]:
        """The holders."""
        return [holder.pid for holder in self._holders]

    def close(self) -> None:
        """Ends the holders; the kernel takes down the rest."""
        for holder in self._holders:
            holder.kill()
        for holder in self._holders:
            holder.wait()
        self._holders = []

    def _connect(self, machines: int) -> None:
        switch, host_link = self._holders[0], f"tm{secrets.token_hex(5)}"
        _batch(
            [],
            f"link add {host_link} type veth peer name up0 netns {switch.pid}",
            f"address add {self.host_address}/24 dev {host_link}",
            f"link set {host_link} up",
        )
        cables = [
            line
            for machine in range(machines)
            for line in (
                f"link add m{machine} type veth peer name eth0 netns {self._holders[machine + 1].pid}",
                f"link set m{machine} master br0 up",
            )
        ]
        bridge = ("link add br0 type bridge", "link set br0 up", "link set up0 master br0 up")
        _batch(_enter(switch), *bridge, *cables)
        for machine in range(machines):
            _batch(
                self.prefix(machine),
                "link set lo up",
                f"address add {self.address(machine)}/24 dev eth0",
                "link set eth0 up",
            )


def _hold() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["unshare", "--net", "sleep", "infinity"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: process_tree.set_parent_death_signal(signal.SIGKILL),
    )


def _wait_for_namespace(holder: subprocess.Popen[bytes]) -> None:
    ours = os.readlink("/proc/self/ns/net")
    deadline_s = time.monotonic() + _HOLDER_S
    while os.readlink(f"/proc/{holder.pid}/ns/net") == ours:
        if holder.poll() is not None or time.monotonic() > deadline_s:
            raise NetworkError("found no new network namespace, expected `unshare --net` to make one; is it allowed?")
        time.sleep(0.005)


def _enter(holder: subprocess.Popen[bytes]) -> list[str]:
    return ["nsenter", f"--net=/proc/{holder.pid}/ns/net", "--"]


def _batch(prefix: list[str], *lines: str) -> None:
    _run([*prefix, "ip", "-batch", "-"], "\n".join(lines) + "\n")


def _run(command: list[str], text: str = "") -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NetworkError(f"`{' '.join(command)}` took longer than {_TOOL_S:g} s") from error
    if done.returncode != 0:
        raise NetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _free_subnet(routes: str) -> ipaddress.IPv4Network:
    """One of 10.x.y.0/24 that no route of this computer meets."""
    taken = []
    for word in routes.split():
        if word[:1].isdigit():
            try:
                network = ipaddress.IPv4Network(word, strict=False)
            except ValueError:
                continue
            if network.prefixlen >= 8:  # a default route meets all
                taken.append(network)
    chooser = random.SystemRandom()
    for _ in range(1000):
        subnet = ipaddress.IPv4Network(f"10.{chooser.randrange(64, 255)}.{chooser.randrange(256)}.0/24")
        if not any(subnet.overlaps(network) for network in taken):
            return subnet
    raise NetworkError("found no free network of 10.0.0.0/8, expected one for the machines")
