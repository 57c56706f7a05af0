"""Controller and agents as real processes over gRPC: who is let in, what survives which death, what is left behind.

Ranks are stand-ins without torch (`control_rank.py`) whose half of the protocol is the real one.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import grpc
import pytest

from megatron.resilience.cli.tls_flags import tls_words
from megatron.resilience.controller import wire
from megatron.resilience.controller.client import ClientError, ControllerClient
from megatron.resilience.protocol.journal import AnyEntry, JobEnded
from megatron.resilience.protocol.messages import Accepted, AskStatus, Finished, ProgressLine, Refused, encode
from tests.functional.control_job import ControlJob, Waiting, certificates

pytestmark = pytest.mark.distributed

Make = Callable[..., ControlJob]


@pytest.fixture(name="make")
def make_fixture(tmp_path: Path) -> Iterator[Make]:
    made: list[ControlJob] = []

    def make(**shape: int) -> ControlJob:
        made.append(ControlJob(tmp_path, **shape))
        return made[-1]

    yield make
    for job in made:
        job.end()


def nothing() -> None:
    """What is done before a command is asked again."""


def running(make: Make, **shape: int) -> ControlJob:
    job = make(**shape)
    job.start()
    job.wait_for("running")
    job.hub.wait_for_iterations(3)
    return job


def test_a_machine_is_replaced_while_ranks_train_and_everything_ends(make: Make) -> None:
    job = running(make, slots=3, per_machine=2, elastic=1)
    stayer = job.hub.holder(0)
    migration = job.migrate("machine-1")
    finished = migration.result()
    assert isinstance(finished, Finished), finished
    assert finished.ok, finished.text
    assert "slot 1 from machine-1 to machine-3 at iteration" in finished.text
    assert isinstance(migration.answers[0], Accepted)
    assert any(isinstance(answer, ProgressLine) and "all are ready" in answer.text for answer in migration.answers)
    assert [job.hub.holder(rank)[0] for rank in range(6)] == [1, 1, 2, 2, 1, 1]
    assert job.hub.holder(0) == stayer
    incident = finished.incident
    assert incident is not None
    assert (incident.leavers, incident.joiners, incident.downtime_ms) == (("machine-1",), ("machine-3",), 12.5)
    assert incident.ranks_measured == 6
    machines = {machine.machine_id: machine for machine in job.status().machines}
    assert (machines["machine-1"].slot, machines["machine-3"].slot) == (None, 1)
    job.hub.wait_for_iterations(3)
    job.finish()
    assert job.controllers[0].wait() == 0
    events = [json.loads(line) for line in job.resilience.events.read_text().splitlines()]
    mine = [(event["kind"], event["name"]) for event in events if event["id"] == "g2"]
    assert mine[0] == ("BEGIN", "migration")
    assert mine[-1] == ("END", "done")
    assert ("INSTANT", "wait for boundary") in mine


def test_the_leaver_can_come_back(make: Make) -> None:
    job = running(make, slots=2, elastic=1)
    for leaver, joiner in (("machine-1", "machine-2"), ("machine-2", "machine-1"), ("machine-0", "machine-2")):
        finished = job.migrate_when_free(leaver, joiner)
        assert isinstance(finished, Finished), finished
        assert finished.ok, finished.text
    assert [incident.generation for incident in job.incidents()] == [2, 3, 4]
    job.finish()


def test_two_migrations_at_once_go_one_after_the_other(make: Make) -> None:
    job = running(make, slots=3, elastic=2)
    first = job.migrate("machine-0")
    second = job.migrate("machine-2")
    results = [first.result(), second.result()]
    assert all(isinstance(result, Finished) and result.ok for result in results), results
    queued = [text for text in (_first_text(first), _first_text(second)) if "queued behind 1" in text]
    assert len(queued) == 1
    assert sorted(incident.generation for incident in job.incidents()) == [2, 3]
    job.finish()


def _first_text(waiting: object) -> str:
    answer = waiting.answers[0]  # type: ignore[attr-defined]
    assert isinstance(answer, Accepted)
    return answer.text


@pytest.mark.parametrize(
    ("leavers", "to", "said"),
    [
        (("machine-9",), (), "machine machine-9 is unknown"),
        (("machine-2",), (), "holds no slot"),
        (("machine-0",), ("machine-1",), "holds slot 1"),
        (("machine-0", "machine-1"), (), "no elastic machine is free"),
    ],
)
def test_what_cannot_be_is_refused_and_training_goes_on(
    make: Make, leavers: tuple[str, ...], to: tuple[str, ...], said: str
) -> None:
    job = running(make, slots=2, elastic=1)
    refused = job.migrate(*leavers, to=to).result()
    assert isinstance(refused, Refused)
    assert said in refused.why
    job.hub.wait_for_iterations(3)
    assert job.incidents() == ()
    job.finish()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("CONTROL_DIGEST_machine-2", "another", "model configuration: found another, the job runs same"),
        ("CONTROL_FREE_machine-2", "98", "its ranks will need 100 bytes, 99 bytes more than now, and 98 bytes is free"),
    ],
)
def test_a_joiner_that_would_not_do_is_refused_and_the_next_taken(
    make: Make, variable: str, value: str, said: str
) -> None:
    job = make(slots=2, elastic=1)
    job.environment = {variable: value, "CONTROL_FREE_machine-3": "1000"}
    job.start()
    job.until(lambda: len(job.status().machines) == 3, "the first elastic machine, which is idle longest")
    job.start_agent("machine-3", elastic=True)
    job.until(lambda: len(job.status().machines) == 4, "the second")
    job.wait_for("running")
    finished = job.migrate("machine-0").result()
    assert isinstance(finished, Finished)
    assert finished.ok, finished.text
    outcomes = [(one.outcome, one.joiners, one.why) for one in job.incidents()]
    assert outcomes[0][:2] == ("aborted", ("machine-2",))
    assert said in outcomes[0][2]
    assert outcomes[1][:2] == ("done", ("machine-3",))
    job.finish()


def test_a_joiner_whose_agent_is_killed_is_given_up_for_the_next(make: Make) -> None:
    job = running(make, slots=2, elastic=2)
    for name in ("machine-2", "machine-3"):
        job.agents[name].process.send_signal(signal.SIGSTOP)  # whichever is chosen never starts its ranks
    migration = job.migrate("machine-0")
    job.until(lambda: [one for one in job.status().machines if one.state == "joining"], "a joiner")
    (chosen,) = (one.machine_id for one in job.status().machines if one.state == "joining")
    (other,) = {"machine-2", "machine-3"} - {chosen}
    job.agents[other].process.send_signal(signal.SIGCONT)
    job.agents.pop(chosen).kill()
    job.start_agent(chosen, elastic=True)  # another incarnation: what the first was asked for is lost
    finished = migration.result()
    assert isinstance(finished, Finished)
    assert finished.ok, finished.text
    incidents = [(one.outcome, one.joiners) for one in job.incidents()]
    assert incidents[0] == ("aborted", (chosen,))
    assert incidents[-1] == ("done", (other,))
    job.finish()


PLAIN = (
    "CommandTaken:1",
    "SwitchBegun:1",
    "SwitchPhase:1",
    "SwitchPhase:2",
    "SwitchGo:1",
    "SwitchLeft:1",
    "SwitchDone:1",
    "SwitchMeasured:1",
    "CommandEnded:1",
)
"""Entries of a migration that goes well, in their order."""
UNDONE = (*PLAIN[:5], "SwitchWithdraw:1", "SwitchAborted:1")
"""Of a try that is withdrawn after GO; a second one follows."""
TRIED_AGAIN = (*UNDONE, "SwitchBegun:2", "SwitchPhase:3", "SwitchPhase:4", "SwitchGo:2", *PLAIN[5:])


def kinds(steps: Iterable[str]) -> set[str]:
    """Without those of the job's beginning and end."""
    return {step.partition(":")[0] for step in steps} - {"JobStarted", "JobRunning", "JobEnded"}


def migrate_with_a_death_after_go(job: ControlJob) -> Waiting:
    """All ranks have said READY and vetoes hold the boundary off when a joiner's rank dies."""
    job.hub.vetoes = True
    migration = job.migrate("machine-1", command_id="the-one")
    job.until(lambda: "wait for boundary" in job.resilience.events.read_text(), "GO")
    os.kill(job.hub.pid(3, 2), signal.SIGKILL)
    return migration


@pytest.mark.parametrize(("is_undone", "expected"), [(False, PLAIN), (True, TRIED_AGAIN)])
def test_the_steps_of_a_migration_are_those_at_which_controllers_are_killed(
    make: Make, is_undone: bool, expected: tuple[str, ...]
) -> None:
    job = running(make, slots=2, per_machine=2, elastic=2)
    if is_undone:
        migration = migrate_with_a_death_after_go(job)
        job.until(lambda: "aborted" in job.resilience.events.read_text(), "an abort")
        job.hub.vetoes = False
    else:
        migration = job.migrate("machine-1")
    finished = migration.result()
    assert isinstance(finished, Finished)
    assert finished.ok, finished.text
    job.finish()
    assert job.controllers[0].wait() == 0
    assert kinds(type(entry).__name__ for entry in job.entries()) == kinds(expected)


def test_a_controller_is_killed_at_each_kind_of_entry() -> None:
    assert kinds(kind.__name__ for kind in typing.get_args(AnyEntry)) == kinds([*PLAIN, *TRIED_AGAIN])


# One of each kind in every run: nothing begun, prepared, given to the lead, past the point of no return.
EACH_RUN = (("SwitchBegun:1", False), ("SwitchGo:1", True), ("SwitchGo:1", False), ("SwitchLeft:1", False))


@pytest.mark.parametrize(
    ("step", "half"),
    [
        pytest.param(step, half, marks=() if (step, half) in EACH_RUN else pytest.mark.nightly)
        for step in PLAIN
        for half in (True, False)
    ],
)
def test_controller_killed_at_each_step_of_a_migration(make: Make, step: str, half: bool) -> None:
    """`half`: just before the entry is on disk."""
    job = make(slots=2, per_machine=2, elastic=1)
    job.start(die_at=step, half=half)
    job.wait_for("running")
    job.hub.wait_for_iterations(2)
    migration = job.migrate("machine-1", command_id="the-one")
    check_another_finishes_it(job, migration)


@pytest.mark.parametrize(
    ("step", "half"),
    [
        pytest.param(step, half, marks=() if (step, half) == ("SwitchWithdraw:1", False) else pytest.mark.nightly)
        for step in TRIED_AGAIN[TRIED_AGAIN.index("SwitchWithdraw:1") :]
        for half in (True, False)
    ],
)
def test_controller_killed_at_each_step_of_a_migration_that_is_undone_first(make: Make, step: str, half: bool) -> None:
    job = make(slots=2, per_machine=2, elastic=2)
    job.start(die_at=step, half=half)
    job.wait_for("running")
    job.hub.wait_for_iterations(2)
    migration = migrate_with_a_death_after_go(job)
    if UNDONE[-2:].count(step) == 0:  # the first try is over by then
        job.until(lambda: "aborted" in job.resilience.events.read_text(), "an abort")
        job.hub.vetoes = False
    check_another_finishes_it(job, migration)


def check_another_finishes_it(job: ControlJob, migration: Waiting) -> None:
    """The controller kills itself, training goes on, another one ends what the first began."""
    assert job.controllers[0].wait() == -signal.SIGKILL
    job.hub.wait_for_iterations(5)  # nobody controls, and training goes on
    job.hub.vetoes = False
    job.start_controller()
    finished = migration.result()
    assert isinstance(finished, Finished), finished
    assert finished.ok, finished.text
    moved = job.hub.holder(2)[0]
    done = [incident for incident in job.incidents() if incident.outcome == "done"]
    assert [incident.generation for incident in done] == [moved]
    assert job.status().term == 2
    again = job.migrate("machine-1", command_id="the-one").result()
    assert isinstance(again, Finished)
    assert again.text == finished.text
    job.hub.wait_for_iterations(3)
    job.finish()
    assert job.controllers[1].wait() == 0


@pytest.mark.parametrize("step", ["JobStarted:1", pytest.param("JobRunning:1", marks=pytest.mark.nightly)])
def test_controller_killed_while_the_job_begins(make: Make, step: str) -> None:
    job = make(slots=2, elastic=0)
    job.start(die_at=step)
    assert job.controllers[0].wait() == -signal.SIGKILL
    job.start_controller()
    job.wait_for("running")
    job.hub.wait_for_iterations(3)
    job.finish()
    assert job.controllers[1].wait() == 0


def test_agents_find_a_controller_that_comes_back_elsewhere(make: Make) -> None:
    job = running(make, slots=2, elastic=1)
    before = job.resilience.read_address()
    for _ in range(3):
        job.controllers[-1].kill()
        job.hub.wait_for_iterations(3)
        job.start_controller()
        job.until(lambda: all(one.attached for one in job.status().machines), "agents that attach again")
    assert job.resilience.read_address() != before
    assert job.status().term == 4
    job.finish()


@pytest.mark.nightly
def test_idle_connection_lasts(make: Make) -> None:
    job = make(slots=1, elastic=0)
    job.start_controller()
    job.start_agent("machine-9", elastic=True)
    job.until(lambda: [one for one in job.status().machines if one.attached], "an agent")
    with pytest.raises(subprocess.TimeoutExpired):
        job.agents["machine-9"].wait(30.0)
    assert job.controllers[0].text.count("agent connection") == 1
    assert "GOAWAY" not in job.agents["machine-9"].text


def test_job_that_ends_while_no_controller_runs_is_ended_by_the_next(make: Make) -> None:
    job = running(make, slots=2, elastic=1)
    job.controllers[-1].kill()
    job.hub.finish()
    job.hub.wait(lambda: job.hub.results[job.hub.iteration][2] == 1, what="the last vote")
    job.start_controller()
    assert [agent.wait() for agent in job.agents.values()] == [0, 0, 0]
    assert job.controllers[-1].wait() == 0
    job.wait_until_nothing_lives()


def test_killed_agent_takes_its_ranks_along_and_the_job_ends(make: Make) -> None:
    job = running(make, slots=2, per_machine=2, elastic=1)
    job.agents["machine-1"].kill()
    assert job.agents["machine-0"].wait() == 1
    assert "PeerLost" in job.agents["machine-0"].text
    assert job.agents["machine-2"].wait() == 0
    assert job.controllers[0].wait() == 0
    ended = job.entries()[-1]
    assert isinstance(ended, JobEnded)
    assert not ended.ok
    assert "PeerLost" in ended.why
    job.wait_until_nothing_lives()


def test_a_second_agent_with_a_holders_name_is_turned_away_and_hears_of_the_end(make: Make) -> None:
    job = running(make, slots=1, elastic=0)
    first = job.agents["machine-0"]
    second = job.start_agent("machine-0")
    job.until(lambda: "asks again: found another agent of machine machine-0 connected" in second.text, "words")
    job.hub.wait_for_iterations(3)
    assert second.process.poll() is None
    assert second.text.count("found another agent") == 1
    job.finish()
    assert first.wait() == 0


def test_background_agent_lives_through_hang_up_and_ctrl_c(make: Make) -> None:
    job = make(slots=1, elastic=0)
    job.start_controller()
    agent = job.start_agent("machine-0", under=("sh", "-c", 'trap "" HUP INT; exec "$@"', "sh"))
    job.wait_for("running")
    said = Path(f"/proc/{agent.process.pid}/status").read_text()
    (ignored,) = (int(line.split()[1], 16) for line in said.splitlines() if line.startswith("SigIgn"))
    for number in (signal.SIGHUP, signal.SIGINT):
        assert ignored & 1 << (number - 1)
        agent.process.send_signal(number)
    job.hub.wait_for_iterations(3)
    job.finish()


def test_machine_that_can_start_no_process_is_given_up_and_can_be_asked_again(make: Make) -> None:
    job = running(make, slots=2, elastic=1)
    pid = job.agents["machine-2"].process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))  # what is open stays open
    finished = job.migrate("machine-1").result()
    assert isinstance(finished, Finished)
    assert not finished.ok
    assert "its spawner cannot be started: [Errno 24] Too many open files" in finished.text
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    finished = job.migrate("machine-1").result()
    assert isinstance(finished, Finished)
    assert finished.ok, finished.text
    job.finish()


def test_agent_that_was_away_hears_of_the_end(make: Make) -> None:
    job = make(slots=1, elastic=0)
    job.start_controller("--linger", "50")
    job.start_agent("machine-0")
    job.start_agent("machine-1", elastic=True)
    job.wait_for("running")
    job.until(lambda: len(job.status().machines) == 2, "both agents")
    job.agents["machine-1"].kill()
    job.hub.finish()
    assert job.agents["machine-0"].wait() == 0
    job.until(lambda: job.status().state == "ended", "the end")
    assert job.start_agent("machine-1", elastic=True).wait() == 0
    assert job.controllers[0].wait() == 0
    assert "have not come to hear of it" not in job.controllers[0].text


def test_agent_without_ranks_ends_when_its_controller_is_gone_for_good(make: Make) -> None:
    job = make(slots=1, elastic=0)
    job.start_controller()
    agent = job.start_agent("machine-0", "--without-controller", "0.5", elastic=True)
    job.until(lambda: [one for one in job.status().machines if one.attached], "an agent")
    job.controllers[0].kill()
    assert agent.wait() == 1
    assert "has let this agent in for 0.5 s, and no rank runs here; start it again if the job" in agent.text


def test_killed_rank_ends_the_job_with_its_cause(make: Make) -> None:
    job = running(make, slots=2, per_machine=2, elastic=0)
    os.kill(job.hub.holder(3)[1], signal.SIGKILL)
    assert job.agents["machine-1"].wait() == 1
    assert "global rank 3 on machine 1 was killed by signal 9" in job.agents["machine-1"].text
    assert job.agents["machine-0"].wait() == 1
    job.wait_until_nothing_lives()


def test_an_only_joiner_with_another_model_ends_the_migration_and_not_the_job(make: Make) -> None:
    job = make(slots=2, elastic=1)
    job.environment = {"CONTROL_DIGEST_machine-2": "another"}
    job.start()
    job.wait_for("running")
    finished = job.migrate("machine-0").result()
    assert isinstance(finished, Finished)
    assert not finished.ok
    assert "model configuration" in finished.text
    job.until(lambda: not [one for one in job.status().machines if one.state != "training" and one.slot], "rest")
    assert job.hub.holder(0)[0] == 1
    job.hub.wait_for_iterations(3)
    job.finish()


def test_wrong_token_is_refused_to_agents_and_users(make: Make) -> None:
    job = make(slots=1, elastic=0)
    job.start_controller()
    job.until(job.resilience.address_file.exists, "an address")
    stranger = job.start_agent("stranger", TRAINMOVER_TOKEN="wrong")
    assert stranger.wait() == 1
    assert "refuses this agent: found another token than the job's" in stranger.text
    with pytest.raises(ClientError, match="found another token"):
        list(
            ControllerClient(where=str(job.resilience.path), token="wrong").ask(
                AskStatus(), patience_s=5, retry=nothing
            )
        )
    assert job.status().machines == ()
    assert "refused a call" in job.controllers[0].text


def test_another_version_of_the_wire_is_refused(make: Make) -> None:
    job = make(slots=1, elastic=0)
    job.start_controller()
    job.until(job.resilience.address_file.exists, "an address")
    with grpc.insecure_channel(job.resilience.read_address(), options=wire.OPTIONS) as channel:
        ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{wire.SERVICE}/{wire.ASK}")
        old = ((wire.TOKEN_KEY, job.token), (wire.VERSION_KEY, "0"))
        with pytest.raises(grpc.RpcError) as refused:
            list(ask(encode(AskStatus()), metadata=old, timeout=10))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"found version 0 of the control messages, expected {wire.WIRE_VERSION}" in str(refused.value.details())
        with pytest.raises(grpc.RpcError) as unread:
            list(ask(b"\xc1", metadata=wire.metadata(job.token), timeout=10))
        assert unread.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert job.status().state == "assembling"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_with_tls_both_ends_show_certificates(make: Make, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    files = certificates(ours)
    flags = tls_words(wire.TlsFiles(**files))
    job = make(slots=1, elastic=0)
    job.tls = wire.TlsFiles(**files)
    job.start_controller(*flags)
    job.start_agent("machine-0", *flags)
    job.wait_for("running")
    strangers = certificates(theirs)
    for tls in (None, wire.TlsFiles(**{**strangers, "authority": files["authority"]})):
        client = ControllerClient(where=str(job.resilience.path), token=job.token, tls=tls)
        with pytest.raises(ClientError, match="no controller at"):
            list(client.ask(AskStatus(), patience_s=1, retry=nothing))
    job.finish()


def test_a_second_controller_and_another_jobs_journal_are_refused(make: Make) -> None:
    job = make(slots=1, elastic=0)
    job.start_controller()
    job.until(job.resilience.address_file.exists, "an address")
    second = job.start_controller()
    assert second.wait() == 1
    assert "in use by another controller" in second.text
    job.controllers[0].process.terminate()
    assert job.controllers[0].wait() == 0
    job.slots = 2
    other = job.start_controller()
    assert other.wait() == 1
    assert "found the journal of another job" in other.text
