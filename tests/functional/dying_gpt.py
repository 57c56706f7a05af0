"""pretrain_gpt.py for tests of deaths in a switch: a rank kills itself at a named point of its part, with SIGKILL.

`--die POINT:RANK`: the process that holds, or is to hold, global rank RANK dies at POINT, one of JOINER and LEAVER.
A joiner dies in generation 2 alone, so that the next candidate lives. `--events FILE --first N`: from the top of
iteration N on ranks wait while the switch that FILE tells of needs no iterations, and until one is done. Who dies
writes when to `death` beside FILE. `--never-wait`: ranks go on however long that takes, ever slower.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain_gpt import main
from tests.distributed.patient_gpt import be_patient

PRELOAD = ("megatron.training.preload", "megatron.training.pretrain")
LIMIT_S = 100.0
PACE_S = 0.05
"""Of an iteration while a switch is under way: a short job is to outlast it."""
SLOW_FROM = 30
SLOW_S = 1.5
"""Of an iteration from SLOW_FROM on, of a job that never waits, until a switch is done."""
DYING_GENERATION = "2"


def preflight(argv: list[str]) -> int:
    """As pretrain_gpt.py's. The launcher looks for this name."""
    return run([*argv])


DEATH: list[Path] = []
"""Where a rank that dies writes when: seconds of the monotonic clock, which all processes share."""


def die() -> None:
    for path in DEATH:
        path.write_text(repr(time.monotonic()), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, *, calls: int = 1) -> None:
    """The process dies in place of the `calls`-th call of `owner.name`."""
    real, left = getattr(owner, name), [calls]

    def dying(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            die()
        return real(*args, **kwargs)

    setattr(owner, name, dying)


def after(owner: Any, name: str, *, calls: int = 1) -> None:
    """The process dies when the `calls`-th call of `owner.name` returns."""
    real, left = getattr(owner, name), [calls]

    def dying(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0:
            die()
        return result

    setattr(owner, name, dying)


def saying(report: str) -> Callable[[], None]:
    """Dies when the agent has been told a report of that name in a switch."""

    def patch() -> None:
        from megatron.resilience.worker.agent_link import AgentLink

        send = AgentLink.send

        def dying(link: AgentLink, said: Any) -> None:
            send(link, said)
            if type(said).__name__ == report and said.generation > 1:
                link.flush(LIMIT_S)
                die()

        AgentLink.send = dying  # type: ignore[method-assign, assignment]

    return patch


def building() -> None:
    from megatron.training import joining

    before(joining, "take_inventory")


def receiving() -> None:
    from megatron.resilience.state import state_client

    before(state_client, "checksum", calls=2)


def holding_all() -> None:
    from megatron.resilience.state.state_client import StateClient

    before(StateClient, "receive_verdict")


def told_to_live() -> None:
    import trainmover_ext

    before(trainmover_ext, "go_live")


def voting() -> None:
    from megatron.resilience.worker.rank_worker import RankWorker

    before(RankWorker, "vote")


def having_voted() -> None:
    from megatron.resilience.worker.rank_worker import RankWorker

    after(RankWorker, "vote")


def sending() -> None:
    from megatron.resilience.state import state_session

    before(state_session, "checksum", calls=2)


def having_left() -> None:
    import trainmover_ext

    after(trainmover_ext, "leave_switch")


JOINER: dict[str, Callable[[], None]] = {
    "building": building,
    "built": saying("Built"),
    "ready": saying("Ready"),
    "receiving": receiving,
    "holding-all": holding_all,
    "told-to-live": told_to_live,
    "voting": voting,
    "having-voted": having_voted,
}
LEAVER: dict[str, Callable[[], None]] = {
    "listening": saying("Ready"),
    "sending": sending,
    "leaving": having_left,
    "left": saying("Left"),
}


def doom(point: str, rank: str) -> None:
    """This process, if it is the one."""
    generation = os.environ.get("TRAINMOVER_JOIN_GENERATION")
    if os.environ.get("RANK") != rank:
        return
    if point in JOINER and generation == DYING_GENERATION:
        JOINER[point]()
    if point in LEAVER and generation is None:
        LEAVER[point]()


class Patience:
    """Keeps the job from ending before its switch, as the controller's event log tells of it."""

    def __init__(self, events: Path, first: int, *, never_waits: bool) -> None:
        self._events, self._first, self._never_waits = events, first, never_waits

    def wait(self, iteration: int) -> None:
        """Raises TimeoutError."""
        if iteration < self._first:
            return
        if self._never_waits:
            until_s = time.monotonic() + (2 * PACE_S if iteration < SLOW_FROM else SLOW_S)
            while self._moves() is not False and time.monotonic() < until_s:
                time.sleep(PACE_S / 2)
            return
        deadline_s = time.monotonic() + LIMIT_S
        while (moves := self._moves()) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"iteration {iteration}: no switch needed it within {LIMIT_S:g} s")
            time.sleep(PACE_S / 2)
        if moves:
            time.sleep(PACE_S)

    def _moves(self) -> bool | None:
        """Whether a switch is under way that needs iterations; None if one is still to come."""
        text = self._events.read_text(encoding="utf-8")
        records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        ended = {record["id"]: record["name"] for record in records if record["kind"] == "END"}
        prepared = {record["id"] for record in records if record["name"] == "prepare leaver"}
        if prepared - ended.keys():
            return True
        return False if "done" in ended.values() else None


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--events", type=Path)
    parser.add_argument("--first", type=int, default=3)
    parser.add_argument("--never-wait", action="store_true")
    own, script = parser.parse_known_args(argv)
    if "--preflight-only" not in script:
        if own.events is not None:
            be_patient(Patience(own.events, own.first, never_waits=own.never_wait).wait)
            DEATH.append(own.events.with_name("death"))
        for doomed in own.die:
            doom(*doomed.rsplit(":", 1))
    return main(script)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
