"""Which failure is named first, and in what words."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron.resilience.agent.failure import (
    SUMMARY_CHARACTERS_MAX,
    FailureClass,
    FailureReport,
    cause,
    classify,
    describe,
    exit_code,
    first_failure,
    last_words,
    shorten,
)

KILLED = FailureReport(global_rank=3, group_rank=1, time_s=9.0, signal_number=9, log_path="logs/rank-0003.log")
RAISED = FailureReport(global_rank=2, group_rank=1, time_s=5.0, exit_code=1, exception="ValueError: bad")
RAISED_LATER = FailureReport(global_rank=0, group_rank=0, time_s=6.0, exit_code=1, exception="KeyError: 'x'")
LOST = FailureReport(
    global_rank=1, group_rank=0, time_s=1.0, exit_code=1, exception="RuntimeError: Connection closed by peer"
)


@pytest.mark.parametrize("order", list(itertools.permutations([KILLED, RAISED, RAISED_LATER, LOST])))
def test_kind_decides_before_time_in_any_order_of_observation(order: tuple[FailureReport, ...]) -> None:
    verdict = first_failure(order)
    assert verdict is not None
    assert (verdict.report, verdict.failure_class) == (KILLED, FailureClass.KILLED)
    assert verdict.reason == "the others (3) look like consequences"


def test_time_decides_among_failures_of_one_kind() -> None:
    verdict = first_failure([RAISED_LATER, LOST, RAISED])
    assert verdict is not None
    assert verdict.report == RAISED
    assert verdict.reason == "the earliest of 2 alike"


def test_no_report_is_no_failure() -> None:
    assert first_failure([]) is None


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4096",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",
        "trainmover_ext.PeerLost: global rank 3",
        "trainmover_ext.CollectiveAborted: global rank 3 is lost",
        "torch.distributed.DistNetworkError: The client socket has failed to connect",
    ],
)
def test_words_of_a_lost_peer_are_known(message: str) -> None:
    report = FailureReport(global_rank=0, group_rank=0, time_s=0.0, exit_code=1, exception=message)
    assert classify(report) is FailureClass.LOST_PEER


@pytest.mark.parametrize("message", ["ValueError: peer is odd", "RuntimeError: shape mismatch", "MemoryError", ""])
def test_other_exceptions_are_its_own(message: str) -> None:
    report = FailureReport(global_rank=0, group_rank=0, time_s=0.0, exit_code=1, exception=message)
    assert classify(report) is FailureClass.RAISED


def test_lost_peer_is_told_by_details_too() -> None:
    report = FailureReport(global_rank=0, group_rank=0, time_s=0.0, exception="X: no", details="X: no\nPeerLost(3)")
    assert classify(report) is FailureClass.LOST_PEER


def test_abort_after_a_lost_peer_is_a_consequence_and_other_aborts_are_not() -> None:
    abort = {"global_rank": 0, "group_rank": 0, "time_s": 0.0, "signal_number": 6}
    assert classify(FailureReport(**abort, details="what(): Connection reset by peer")) is FailureClass.LOST_PEER  # type: ignore[arg-type]
    assert classify(FailureReport(**abort, details="double free")) is FailureClass.KILLED  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (KILLED, "global rank 3 on machine 1 was killed by signal 9 (SIGKILL)"),
        (RAISED, "global rank 2 on machine 1 failed: ValueError: bad"),
        (
            FailureReport(global_rank=0, group_rank=0, time_s=0, exit_code=7, exception="last line"),
            "global rank 0 on machine 0 exited with code 7: last line",
        ),
        (
            FailureReport(global_rank=0, group_rank=0, time_s=0, exit_code=1),
            "global rank 0 on machine 0 exited with code 1",
        ),
        (
            FailureReport(global_rank=None, group_rank=2, time_s=0, signal_number=15),
            "the spawner of machine 2 was killed by signal 15 (SIGTERM)",
        ),
        (
            FailureReport(global_rank=0, group_rank=0, time_s=0, signal_number=6, exception="double free"),
            "global rank 0 on machine 0 was killed by signal 6 (SIGABRT): double free",
        ),
        (
            FailureReport(global_rank=0, group_rank=0, time_s=0, signal_number=99),
            "global rank 0 on machine 0 was killed by signal 99 (unknown)",
        ),
    ],
)
def test_closing_line_names_who_and_how(report: FailureReport, line: str) -> None:
    verdict = first_failure([report])
    assert verdict is not None
    assert describe(verdict)[0] == line


def test_closing_lines_name_the_log_file() -> None:
    verdict = first_failure([KILLED])
    assert verdict is not None
    assert describe(verdict)[1:] == ["its whole output is in logs/rank-0003.log"]


def test_a_killed_rank_has_said_nothing_of_its_cause() -> None:
    assert cause(replace(KILLED, exception="iteration 4 of 60")) == "killed by signal 9 (SIGKILL)"
    assert cause(RAISED) == "ValueError: bad"


def test_closing_lines_say_what_to_do_where_that_is_known() -> None:
    verdict = first_failure([replace(KILLED, advice="start the job again")])
    assert verdict is not None
    assert describe(verdict)[1:] == ["start the job again", "its whole output is in logs/rank-0003.log"]


TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    g()", "KeyError: 'first'"]


def test_last_words_are_those_of_the_last_traceback() -> None:
    tail = [*TRACEBACK, "", "During handling of the above exception, another exception occurred:", ""]
    tail += [*TRACEBACK[:-1], "package.module.OtherError: second", "more of it", "sem_unlink: noise at exit"]
    assert last_words(tail)[0] == "package.module.OtherError: second"
    assert "more of it" in last_words(tail)[1]


def test_last_words_are_found_behind_torchs_own_prefix() -> None:
    tail = [*(f"[rank3]: {line}" for line in TRACEBACK), "[W1129 pair.cc:1] noise at exit"]
    assert last_words(tail)[0] == "KeyError: 'first'"


def test_last_words_without_a_traceback_are_the_last_line() -> None:
    assert last_words(["usage: x", "x: error: unrecognized", "  "])[0] == "x: error: unrecognized"
    assert last_words([]) == ("", "")


def test_long_words_are_bounded() -> None:
    assert len(shorten("x" * 10_000 + "\nsecond line")) == SUMMARY_CHARACTERS_MAX + 3


@pytest.mark.parametrize(
    ("interrupted", "report", "has_trained", "all_ended_well", "code"),
    [
        (False, None, True, True, 0),
        (False, None, False, True, 0),
        (False, None, True, False, 1),
        (False, RAISED, True, False, 1),
        (False, FailureReport(global_rank=0, group_rank=0, time_s=0, exit_code=2), False, False, 2),
        (False, FailureReport(global_rank=0, group_rank=0, time_s=0, exit_code=2), True, False, 1),
        (True, None, True, True, 130),
        (True, KILLED, True, False, 130),
    ],
)
def test_exit_code(
    interrupted: bool, report: FailureReport | None, has_trained: bool, all_ended_well: bool, code: int
) -> None:
    verdict = first_failure([] if report is None else [report])
    found = exit_code(interrupted=interrupted, verdict=verdict, has_trained=has_trained, all_ended_well=all_ended_well)
    assert found == code
