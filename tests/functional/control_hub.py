"""The data plane of the stand-in ranks: votes, notes and transfers, over loopback, in a thread of the test.

It keeps what was voted by whom, so that a test can say: in every iteration each rank voted exactly once.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import IO, Any

PACE_S = 0.02


class Peer:
    """One rank's connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank = -1
        self.generation = 0
        self.pid = 0

    def say(self, **message: Any) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # its end is seen where it is read


class ControlHub:
    """See the module. `finish()` ends the job at the next vote."""

    def __init__(self, world: int, host: str = "127.0.0.1") -> None:
        self.world = world
        self._server = socket.create_server((host, 0), backlog=256)
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self.port = self._server.getsockname()[1]
        self._changed = threading.Condition()
        self._peers: list[Peer] = []
        self._holders: dict[int, Peer] = {}
        self._votes: dict[int, dict[int, tuple[Peer, list[int]]]] = {}
        self.voters: dict[int, dict[int, int]] = {}
        """Iteration -> rank -> generation of the process that voted."""
        self.results: dict[int, list[int]] = {}
        self.faults: list[str] = []
        self._exits = False
        self.vetoes = False
        """Whether every vote has a veto from now on, as if a rank had an obstacle."""
        self._last_s = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()
        with self._changed:
            for peer in self._peers:
                peer.connection.close()

    def finish(self) -> None:
        with self._changed:
            self._exits = True

    @property
    def iteration(self) -> int:
        return max(self.results, default=0)

    def wait(self, holds: Any, limit_s: float = 60.0, what: str = "") -> None:
        """Waits until `holds()`; the hub wakes it."""
        with self._changed:
            assert self._changed.wait_for(holds, limit_s), f"not within {limit_s} s: {what}"

    def wait_for_iterations(self, more: int, limit_s: float = 60.0) -> None:
        """Waits until the job has trained `more` further iterations."""
        target = self.iteration + more
        self.wait(lambda: self.iteration >= target, limit_s, f"iteration {target}, found {self.iteration}")

    def holder(self, rank: int) -> tuple[int, int]:
        """(generation, pid) of the process that trains as `rank`."""
        with self._changed:
            return self._holders[rank].generation, self._holders[rank].pid

    def pid(self, rank: int, generation: int) -> int:
        """Of the process that was started as `rank` in `generation`, and has connected."""
        with self._changed:
            peer = self._joiner(rank, generation)
            assert peer is not None, f"no process of global rank {rank}, generation {generation}"
            return peer.pid

    def check(self) -> None:
        """Every rank voted once in each iteration, in order, and nobody did what it may not."""
        assert not self.faults
        assert sorted(self.voters) == list(range(1, self.iteration + 1))
        for iteration, voters in self.voters.items():
            assert sorted(voters) == list(range(self.world)), f"iteration {iteration}"
        for rank in range(self.world):
            generations = [self.voters[iteration][rank] for iteration in sorted(self.voters)]
            assert generations == sorted(generations), f"rank {rank} was held by {generations}"

    # -------------------------------------------------------------- threads

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            peer = Peer(connection)
            with self._changed:
                self._peers.append(peer)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: Peer) -> None:
        file: IO[bytes] = peer.connection.makefile("rb")
        try:
            for line in file:
                with self._changed:
                    self._hear(peer, json.loads(line))
                    self._changed.notify_all()
        except OSError:
            pass
        with self._changed:
            self._lose(peer)
            self._changed.notify_all()

    def _hear(self, peer: Peer, said: dict[str, Any]) -> None:
        match said["kind"]:
            case "hello":
                peer.rank, peer.generation, peer.pid = said["rank"], said["generation"], said["pid"]
                if peer.generation == 1:
                    self._holders[peer.rank] = peer
            case "live":
                self._holders[peer.rank] = peer
            case "vote":
                self._vote(peer, said["iteration"], said["numbers"])
            case "note":
                self._holders[said["to"]].say(kind="note", sender=peer.rank, payload=said["payload"])
            case "to leaver":
                self._holders[peer.rank].say(kind=said["what"], generation=said["generation"])
            case "to joiner":
                joiner = self._joiner(peer.rank, said["generation"])
                if joiner is not None:
                    joiner.say(**{**said, "kind": said["what"]})
                elif said["what"] == "state":
                    peer.say(kind="joiner lost", generation=said["generation"])

    def _joiner(self, rank: int, generation: int) -> Peer | None:
        found = [peer for peer in self._peers if (peer.rank, peer.generation) == (rank, generation)]
        return found[0] if found else None

    def _vote(self, peer: Peer, iteration: int, numbers: list[int]) -> None:
        votes = self._votes.setdefault(iteration, {})
        if peer.rank in votes:
            self.faults.append(f"rank {peer.rank} voted twice in iteration {iteration}")
        if self._holders.get(peer.rank) is not peer:
            self.faults.append(f"rank {peer.rank} of generation {peer.generation} voted in {iteration}: no holder")
        votes[peer.rank] = (peer, numbers)
        if len(votes) < self.world:
            return
        threading.Event().wait(max(0.0, self._last_s + PACE_S - time.monotonic()))
        self._last_s = time.monotonic()
        result = [max(column) for column in zip(*(given for _, given in votes.values()), strict=True)]
        result[1] = max(result[1], int(self.vetoes))
        result[2] = max(result[2], int(self._exits))
        self.results[iteration] = result
        self.voters[iteration] = {rank: voter.generation for rank, (voter, _) in votes.items()}
        del self._votes[iteration]
        for voter, _ in votes.values():
            voter.say(kind="result", iteration=iteration, numbers=result)

    def _lose(self, peer: Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
        ended = bool(self.results) and self.results[self.iteration][2]
        if self._holders.get(peer.rank) is peer and not ended:
            for other in self._peers:
                other.say(kind="lost", rank=peer.rank)
