"""What a rank answers while links are prepared beside its live ones; whole switches are in tests/distributed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

import trainmover_ext
from megatron.resilience.protocol.messages import PrepareStayer, RankCommand, RankReport, Ready, Unready
from megatron.resilience.protocol.vote import Contribution
from megatron.resilience.worker.handover import Handover
from megatron.resilience.worker.rank_worker import Place, RankWorker
from trainmover_ext.switching import SwitchPhase, SwitchState


@dataclass
class Line:
    """The agent's end of the rank's line."""

    commands: list[RankCommand] = field(default_factory=list)
    reports: list[RankReport] = field(default_factory=list)

    def send(self, report: RankReport) -> None:
        self.reports.append(report)

    def take(self) -> list[RankCommand]:
        taken, self.commands = self.commands, []
        return taken


@dataclass
class Links:
    """The data plane of a rank whose links to the joiner come up, and break, when the test says so."""

    state: SwitchState = field(default_factory=lambda: SwitchState(phase=SwitchPhase.PENDING, reason=""))
    prepared: list[tuple[int, dict[int, str]]] = field(default_factory=list)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Links:
    made = Links()
    plane: dict[str, Any] = {
        "memory_stats": lambda: {"link_buffers": 1},
        "linked_ranks": lambda: (3,),
        "abort_switch": lambda generation: None,
        "prepare_switch": lambda generation, endpoints: made.prepared.append((generation, dict(endpoints))),
        "switch_state": lambda generation: made.state,
    }
    for name, function in plane.items():
        monkeypatch.setattr(trainmover_ext, name, function)
    return made


class Arenas:
    total_bytes = 10


def test_a_prepared_link_that_breaks_withdraws_readiness(links: Links) -> None:
    line = Line()
    place = Place(global_rank=1, job="job", token="token", bind_address="127.0.0.1")
    worker = RankWorker(place, line, inventory=Arenas(), handover=Handover(), all_reduce=lambda own: own)

    def vote(iteration: int) -> Contribution:
        return worker.vote(iteration, obstacles=(), exits=0)

    assert vote(1).veto == 0
    line.commands = [PrepareStayer(generation=2, joiners={3: "joiner of 3"})]
    assert vote(2).veto == 1
    assert links.prepared == [(2, {3: "joiner of 3"})]
    assert line.reports == []
    links.state = SwitchState(phase=SwitchPhase.READY, reason="")
    assert vote(3).veto == 0
    assert line.reports == [Ready(generation=2, linked=(3,))]
    assert vote(4).veto == 0
    links.state = SwitchState(phase=SwitchPhase.BROKEN, reason="the joiner is gone")
    assert vote(5).veto == 1
    assert line.reports[1:] == [Unready(generation=2, why="the joiner is gone")]
