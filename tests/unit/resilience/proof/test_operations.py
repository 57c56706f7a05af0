"""Which operation is named as the first that differs, of traces as ranks write them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.resilience.proof.operations import TracedOperation, first_operation, joined, read_trace

LINE = "7\t3\t1000\t0/5\t2,4\tall_reduce\t-1\t64\t64\t00000000000000aa\t00000000000000bb\t1500\n"


def operation(number: int, **changed: Any) -> TracedOperation:
    values: dict[str, Any] = {
        "number": number,
        "iteration": 1 + number // 2,
        "called_ns": 1000 * number,
        "group": "0/5",
        "global_ranks": (0, 1),
        "operation": "all_reduce",
        "peer": -1,
        "given_bytes": 64,
        "got_bytes": 64,
        "given": "aa",
        "got": "bb",
        "ended_ns": 1000 * number + 500,
    }
    return TracedOperation(**{**values, **changed})


def trace(*changes: dict[str, Any]) -> list[TracedOperation]:
    return [operation(number, **changed) for number, changed in enumerate(changes)]


PLAIN = trace({}, {}, {}, {})


def named(expected: Any, found: Any, again: Any = None) -> str:
    return str(first_operation(expected, expected if again is None else again, found))


def test_a_line_is_read_whole_and_a_cut_last_one_is_left_out() -> None:
    (read,) = read_trace([LINE, LINE[:20]])
    assert read == TracedOperation(
        number=7,
        iteration=3,
        called_ns=1000,
        group="0/5",
        global_ranks=(2, 4),
        operation="all_reduce",
        peer=-1,
        given_bytes=64,
        got_bytes=64,
        given="00000000000000aa",
        got="00000000000000bb",
        ended_ns=1500,
    )


def test_a_line_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 12 fields"):
        read_trace(["something else\n"])


def test_operations_are_in_the_order_of_their_calls_and_processes() -> None:
    late = [LINE.replace("7\t", f"{number}\t", 1) for number in (2, 0, 1)]
    assert [one.number for one in read_trace(late)] == [0, 1, 2]
    joiner = [operation(0, called_ns=9000)]
    assert joined([joiner, [], PLAIN]) == [*PLAIN, *joiner]


def test_equal_traces_have_no_difference() -> None:
    assert first_operation({0: PLAIN, 1: PLAIN}, {0: PLAIN, 1: PLAIN}, {0: PLAIN, 1: PLAIN}) is None


def test_a_rank_that_gives_other_values_is_named_before_those_that_get_them() -> None:
    gets = trace({}, {}, {"got": "xx"}, {"given": "yy"})
    gives = trace({}, {}, {"given": "zz", "got": "xx", "called_ns": 2400}, {"given": "yy"})
    assert named({0: PLAIN, 1: PLAIN}, {0: gets, 1: gives}) == (
        "in iteration 2, on global rank 1, all_reduce number 3 among global ranks 0, 1 (64 bytes): it was given other "
        "values"
    )


def test_an_operation_that_gets_wrong_what_it_was_given_right_is_told_apart() -> None:
    found = trace({}, {"got": "xx"}, {"given": "xx"}, {})
    assert named({0: PLAIN}, {0: found}).endswith(
        "number 2 among global ranks 0, 1 (64 bytes): it was given the same and gave other values"
    )


def test_another_call_in_the_place_of_one_is_named() -> None:
    found = trace({}, {"operation": "broadcast"}, {}, {})
    assert "broadcast number 2 among" in named({0: PLAIN}, {0: found})
    assert named({0: PLAIN}, {0: found}).endswith("another call, expected all_reduce")


def test_what_differs_between_untouched_runs_says_nothing() -> None:
    noisy = trace({}, {"given": "n1", "got": "n2"}, {}, {})
    found = trace({}, {"given": "n3", "got": "n4"}, {}, {"got": "xx"})
    assert "number 4 among" in named({0: PLAIN}, {0: found}, again={0: noisy})


def test_messages_are_compared_by_peer_and_direction_whatever_came_first() -> None:
    messages = [
        operation(0, operation="recv", peer=1, got="m1"),
        operation(1, operation="recv", peer=2, got="m2"),
        operation(2, operation="send", peer=1, given="m3"),
    ]
    assert first_operation({0: messages}, {0: messages}, {0: [messages[2], messages[1], messages[0]]}) is None
    wrong = [messages[0], operation(1, operation="recv", peer=2, got="xx"), messages[2]]
    assert "recv number 1 among" in named({0: messages}, {0: wrong})


def test_what_is_done_outside_of_iterations_is_not_compared() -> None:
    def digests(given: str) -> list[TracedOperation]:
        return [*PLAIN, operation(4, iteration=0, given=given)]

    assert first_operation({0: digests("aa")}, {0: digests("aa")}, {0: digests("xx")}) is None


def test_groups_of_one_run_only_are_not_compared() -> None:
    votes = [operation(9, group="0/vote")]
    assert first_operation({0: PLAIN}, {0: PLAIN}, {0: [*PLAIN, *votes]}) is None
