"""What a planned switch costs a rank that stays, in jobs of 8 to 1,024 ranks, on one computer (`make bench`).

Everything that is measured is real: the extension's link tables, handshakes, sockets, prepare and commit. What is not
there is the rest of the job. One process holds several runtimes of the extension, each a rank with its own threads,
listener and links over loopback: the rank under measure, with the whole link table that its place in a job of N gives
it (all its peers r +- 2^k in the world's group, and its neighbours in groups of 2 and of N/8, N to be at least 16, as
pipelines and data parallelism have them); each of those peers, with all links that they have among themselves; and the
leaver, its peer at distance 1, which moves to a new runtime again and again. Ranks beyond these do not exist. So the
figures show how the cost grows with N for one rank, not how a busy network or 1,024 processes would fare.

Near: the rank under measure. It and every other rank that is linked to the leaver prepare and commit; near's times are
taken while nobody else prepares. Far: a peer of near that the topology gives no link to the leaver. Up to 8 ranks there
is none: all are linked to each other. In a switch its runtime is told what a far rank's is, the table, once, and
nothing else. What it sends and receives over the whole move is counted: messages (handshakes, frames but heartbeats),
payload bytes, connections. The table comes from its agent over a local socket; its size, which grows with N, has a
column of its own. Sizes take turns, so that what else the computer does falls on all. Writes
build/bench/switch_scale.json (docs/schemas/switch_scale.json).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import trainmover_ext._C as _C
from benchmarks import aims
from megatron.resilience.protocol.messages import Directory, encode
from trainmover_ext.endpoints import decode_endpoint, encode_endpoint

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "build" / "bench" / "switch_scale.json"
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
ROUNDS, MOVES = 15, 6
GROWTH_MAX = 1.2
LIMIT_S = 20.0
SETTLED_S = 0.02
TIMEOUT_MS = 20_000
NOTHING = {"messages": 0, "connections": 0, "bytes": 0, "links": 0}


class BenchError(RuntimeError):
    """A switch did not do what is measured here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size of job, as it is written."""

    ranks: int
    near_switch_us: float
    near_messages: int
    far_messages: int
    far_ranks: int
    far_bytes: int
    far_connections: int
    far_table_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One switch."""

    prepare_us: float
    commit_us: float
    near_messages: int
    far_messages: int
    far_bytes: int
    far_connections: int
    far_table_bytes: int
    replaced: int
    kept: int


@dataclass(slots=True, kw_only=True)
class Taken:
    """All switches of one size."""

    samples: list[Sample] = field(default_factory=list)


def peers_of(size: int, rank: int) -> list[int]:
    """As csrc/collectives/topology.h says."""
    if size <= 8:
        return [peer for peer in range(size) if peer != rank]
    distances = [2**k for k in range(size.bit_length()) if 2**k < size]
    return sorted({(rank + sign * distance) % size for distance in distances for sign in (1, -1)})


def far_of(size: int, leaver: int) -> list[int]:
    """Ranks that have no link to the leaver in the world's group."""
    return sorted(set(range(size)) - {leaver} - set(peers_of(size, leaver)))


def groups_of(size: int, near: int) -> dict[str, list[int]]:
    """Groups of the rank under measure: the world, a pipeline pair with the leaver, and every eighth rank."""
    groups = {"world": list(range(size)), "pair": [near, near + 1]}
    if size >= 16:
        groups["eighth"] = list(range(near % 8, size, 8))
    return groups


class Rank:
    """A runtime and the groups that it is in."""

    def __init__(self, rank: int, groups: Mapping[str, Sequence[int]], *, isolated: bool = False) -> None:
        settings = _C.Settings()
        settings.use_shared_memory = False
        settings.local_ranks = 4096  # never spins: there is one computer for all
        settings.flight_recorder_entries = 16
        self.rank = rank
        self.runtime = _C.Runtime(rank, "bench", "token", settings, isolated)
        self.groups = {
            name: _C.open_communicator(_C.Communicator, self.runtime, name, list(ranks), TIMEOUT_MS)
            for name, ranks in groups.items()
            if rank in ranks
        }
        self._ranks = {name: list(ranks) for name, ranks in groups.items()}

    def link(self, name: str, other: Rank) -> None:
        """One message of one byte."""
        ranks = self._ranks[name]
        self.groups[name].send(b"x", ranks.index(other.rank), 5)
        other.groups[name].recv(bytearray(1), ranks.index(self.rank), 5)

    def traffic(self) -> dict[str, int]:
        """Everything it has sent and received, heartbeats aside, and its links."""
        stats = self.runtime.communicator_stats()
        control = self.runtime.control_stats()
        return {
            "messages": control["messages_sent"] + control["messages_received"],
            "connections": control["connections_made"] + control["connections_accepted"],
            "bytes": sum(one["bytes_sent"] + one["bytes_received"] for one in stats),
            "links": sum(one["links"] for one in stats),
        }


class Job:
    """The rank under measure, its peers, and the leaver, in a job of `size`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.near_rank = size // 2 - 4 if size == 8 else size // 2
        self.leaver_rank = self.near_rank + 1
        self.groups = groups_of(size, self.near_rank)
        peers = {name: peers_of(len(ranks), ranks.index(self.near_rank)) for name, ranks in self.groups.items()}
        self.linked = {name: [self.groups[name][peer] for peer in group_peers] for name, group_peers in peers.items()}
        everybody = {self.near_rank, *(rank for ranks in self.linked.values() for rank in ranks)}
        self.ranks = {rank: Rank(rank, self.groups) for rank in sorted(everybody)}
        endpoints = self.endpoints()
        for rank in self.ranks.values():
            rank.runtime.add_endpoints(endpoints)
        for name, one, peer in self.links():
            self.ranks[one].link(name, self.ranks[peer])
        strangers = [rank for rank in far_of(size, self.leaver_rank) if rank in self.ranks]
        self.far_rank = strangers[0] if strangers else None
        self.generation = 1

    @property
    def near(self) -> Rank:
        """The rank under measure."""
        return self.ranks[self.near_rank]

    def links(self) -> list[tuple[str, int, int]]:
        """All that the topology gives to ranks that exist: the group's name and both ends, the lower first."""
        return [
            (name, ranks[place], ranks[peer])
            for name, ranks in self.groups.items()
            for place in range(len(ranks))
            if ranks[place] in self.ranks
            for peer in peers_of(len(ranks), place)
            if place < peer and ranks[peer] in self.ranks
        ]

    def stayers(self) -> list[Rank]:
        """That are linked to the leaver, near first."""
        ends = {rank for _, *pair in self.links() if self.leaver_rank in pair for rank in pair} - {self.leaver_rank}
        return [self.ranks[rank] for rank in sorted(ends, key=lambda rank: (rank != self.near_rank, rank))]

    def endpoints(self) -> dict[int, _C.Endpoint]:
        """Of all that exist."""
        return {rank: made.runtime.endpoint() for rank, made in self.ranks.items()}

    def table(self) -> Directory:
        """As the controller tells it of a job of this size; ranks that do not exist stand for others as long."""
        texts = {rank: encode_endpoint(at) for rank, at in self.endpoints().items()}
        endpoints = {rank: texts.get(rank, texts[self.near_rank]) for rank in range(self.size)}
        generations = [1] * self.size
        generations[self.leaver_rank] = self.generation
        return Directory(endpoints=endpoints, slot_generations=tuple(generations))

    def move(self) -> Sample:
        """One switch, the leaver's rank to a new runtime."""
        self.generation += 1
        generation, near, leaver = self.generation, self.near, self.ranks[self.leaver_rank]
        far = None if self.far_rank is None else self.ranks[self.far_rank]
        joiner = Rank(self.leaver_rank, self.groups, isolated=True)
        joiner.runtime.add_endpoints({rank: at for rank, at in self.endpoints().items() if rank != self.leaver_rank})
        moved = {self.leaver_rank: joiner.runtime.endpoint()}
        # As long a wait at all sizes, near's last: a process that has slept for longer is slower for some 100 us.
        far_before = settled(near if far is None else far)
        before = settled(near)
        joiner.runtime.join_switch(generation)
        stayers = self.stayers()
        prepare_us = prepare(near, generation, moved)
        for rank in stayers[1:]:
            prepare(rank, generation, moved)
        held = leaver.runtime.hold_links(generation)
        if sorted(held) != sorted(rank.rank for rank in stayers):
            raise BenchError(f"{self.size} ranks: the leaver is linked to {sorted(held)}")
        recovery, places = leaver.runtime.handover()
        started_ns = time.perf_counter_ns()
        tallies = near.runtime.commit_switch(generation)
        commit_us = (time.perf_counter_ns() - started_ns) / 1000
        for rank in stayers[1:]:
            rank.runtime.commit_switch(generation)
        leaver.runtime.leave_switch(generation)
        joiner.runtime.go_live(generation, recovery, places)
        self.ranks[self.leaver_rank] = joiner
        table_bytes = 0 if far is None else self.tell(far)
        after, far_after = settled(near), settled(near if far is None else far)
        if far is None:
            far_before = far_after = NOTHING
        if after["links"] != before["links"] or far_after["links"] != far_before["links"]:
            raise BenchError(f"{self.size} ranks: links before {before}, {far_before}, after {after}, {far_after}")
        near.link("pair", joiner)  # that it works
        leaver.runtime.shutdown()
        return Sample(
            prepare_us=prepare_us,
            commit_us=commit_us,
            near_messages=after["messages"] - before["messages"],
            far_messages=far_after["messages"] - far_before["messages"],
            far_bytes=far_after["bytes"] - far_before["bytes"],
            far_connections=far_after["connections"] - far_before["connections"],
            far_table_bytes=table_bytes,
            replaced=sum(tally[2] for tally in tallies),
            kept=sum(tally[1] for tally in tallies),
        )

    def tell(self, far: Rank) -> int:
        """The table, as a rank hears it from its agent: makes known where all others are; gives its bytes."""
        table = self.table()
        for generation in sorted(set(table.slot_generations)):
            endpoints = {
                rank: decode_endpoint(table.endpoints[rank])
                for rank in range(self.size)
                if table.slot_generations[rank] == generation and rank != far.rank
            }
            far.runtime.add_endpoints(endpoints, generation)
        return len(encode(table))

    def close(self) -> None:
        """Ends every runtime."""
        for rank in self.ranks.values():
            rank.runtime.shutdown()


def settled(rank: Rank) -> dict[str, int]:
    """Its traffic, once nothing more comes: what follows a commit goes out in the background."""
    seen, since = rank.traffic(), time.monotonic()
    while time.monotonic() - since < SETTLED_S:
        time.sleep(SETTLED_S / 10)
        if (now := rank.traffic()) != seen:
            seen, since = now, time.monotonic()
    return seen


def prepare(near: Rank, generation: int, moved: Mapping[int, _C.Endpoint]) -> float:
    """Microseconds until all is connected. Raises BenchError when it breaks."""
    started_ns = time.perf_counter_ns()
    near.runtime.prepare_switch(generation, moved)
    while (state := near.runtime.switch_state(generation))[0] != "ready":
        if state[0] == "broken" or time.perf_counter_ns() - started_ns > LIMIT_S * 1e9:
            raise BenchError(f"generation {generation} is {state[0]}: {state[1]}")
        time.sleep(20e-6)
    return (time.perf_counter_ns() - started_ns) / 1000


@contextmanager
def job_of(size: int) -> Iterator[Job]:
    """A job that is ended whatever happens."""
    with ExitStack() as ending:
        job = Job(size)
        ending.callback(job.close)
        yield job


def row_of(size: int, taken: Taken) -> Row:
    """Medians of times. Raises BenchError when switches of one size differ in what they touch."""
    counts = {(sample.replaced, sample.kept) for sample in taken.samples}
    if len(counts) != 1:
        raise BenchError(f"{size} ranks: links replaced and kept differ from switch to switch: {sorted(counts)}")
    return Row(
        ranks=size,
        near_switch_us=round(statistics.median(one.prepare_us + one.commit_us for one in taken.samples), 1),
        near_messages=max(one.near_messages for one in taken.samples),
        far_messages=max(one.far_messages for one in taken.samples),
        far_ranks=len(far_of(size, size // 2)),
        far_bytes=max(one.far_bytes for one in taken.samples),
        far_connections=max(one.far_connections for one in taken.samples),
        far_table_bytes=max(one.far_table_bytes for one in taken.samples),
    )


def growth(rows: Sequence[Row]) -> list[str]:
    """A line for each aim: the worst size against the smallest, and what far ranks have to do with a switch."""
    first = rows[0]
    lines = []
    for name in ("near_switch_us", "near_messages"):
        worst = max(rows, key=lambda row: getattr(row, name))
        ratio = getattr(worst, name) / getattr(first, name)
        text = f"{name}: {worst.ranks} ranks / {first.ranks} ranks = {ratio:.2f} (aim: at most {GROWTH_MAX})"
        lines.append(aims.line(ratio <= GROWTH_MAX, text))
    for name in ("far_messages", "far_bytes", "far_connections"):
        most = max(getattr(row, name) for row in rows)
        lines.append(aims.line(most == 0, f"{name}: {most} (aim: 0)"))
    return lines


def write(rows: Sequence[Row], path: Path) -> None:
    """Writes `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of a few moves")
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--output", type=Path, default=RESULT)
    aims.add_strict(parser)
    return parser.parse_args(words)


def measure(sizes: Sequence[int], rounds: int, moves: int) -> list[Row]:
    """The sizes take turns; the first switch of each job is not counted."""
    taken = {size: Taken() for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            with job_of(size) as job:
                job.move()
                taken[size].samples += [job.move() for _ in range(moves)]
    for size in sizes:
        samples = taken[size].samples
        print(
            f"{size:5d} ranks: prepared in {statistics.median(one.prepare_us for one in samples):7.0f} us, committed "
            f"in {statistics.median(one.commit_us for one in samples):5.0f} us, {samples[0].replaced} links replaced, "
            f"{samples[0].kept} kept"
        )
    return [row_of(size, taken[size]) for size in sizes]


def main(words: Sequence[str] | None = None) -> int:
    """Measures, writes and prints. 0: measured, and with --strict every aim met; 1: a switch failed; 2: wrong flags."""
    flags = parse(words)
    try:
        rows = measure(sorted(flags.sizes), 1 if flags.quick else ROUNDS, 4 if flags.quick else MOVES)
    except BenchError as error:
        print(f"switch_scale_bench: {error}", file=sys.stderr)
        return 1
    for row in rows:
        print(
            f"{row.ranks:5d} ranks: {row.near_switch_us:8.1f} us, {row.near_messages} messages; {row.far_ranks} far: "
            f"{row.far_messages} messages, {row.far_connections} connections, {row.far_table_bytes} bytes of tables"
        )
    lines = growth(rows)
    print(*lines, sep="\n")
    write(rows, flags.output)
    print(f"written to {flags.output}")
    return aims.exit_code(lines, strict=flags.strict)


if __name__ == "__main__":
    sys.exit(main())
