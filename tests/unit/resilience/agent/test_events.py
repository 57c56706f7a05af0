"""Events between spawner and launcher survive the wire; what isn't one is refused."""

from __future__ import annotations

import pytest

from megatron.resilience.agent.events import (
    AgentEvent,
    JobStopped,
    RankExited,
    RankFailed,
    RankStarted,
    SlotReleased,
    SlotTaken,
    decode,
    encode,
)
from megatron.resilience.agent.failure import FailureReport

FAILURE = FailureReport(
    global_rank=3, group_rank=1, time_s=1.5, exception="E: line\nbreak \u00e9", details="d", log_path="l"
)


@pytest.mark.parametrize(
    "event",
    [
        RankStarted(global_rank=3, pid=77),
        RankFailed(failure=FAILURE),
        RankExited(global_rank=3, status=-9, failure=FAILURE),
        RankExited(global_rank=3, status=0, failure=None),
        SlotTaken(group_rank=2),
        SlotReleased(group_rank=2),
        JobStopped(why="all ranks\nhave finished"),
    ],
)
def test_event_comes_out_as_it_went_in_and_is_one_line(event: AgentEvent) -> None:
    data = encode(event)
    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")
    assert decode(data.decode()) == event


@pytest.mark.parametrize(
    "line", ["", "[]", "{}", '{"event": "RankFlew"}', '{"event": "RankFailed", "failure": null}', "{"]
)
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(line)
