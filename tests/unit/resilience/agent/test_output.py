"""A reader that stops or goes away holds nobody up."""

from __future__ import annotations

import os
import time

from megatron.resilience.agent.output import LineSink


def test_lines_arrive_whole() -> None:
    reader, writer = os.pipe()
    LineSink(writer).write(["one", "two \udcff"])
    os.close(writer)
    assert os.read(reader, 100) == b"one\ntwo ?\n"
    os.close(reader)


def test_stalled_reader_costs_one_wait_and_learns_what_it_missed() -> None:
    reader, writer = os.pipe()
    sink = LineSink(writer, stall_s=0.05)
    started_s = time.monotonic()
    sink.write(["x" * 1000] * 10_000)
    assert time.monotonic() - started_s < 2
    received = 0
    os.set_blocking(reader, False)
    try:
        while data := os.read(reader, 65536):
            received += data.count(b"\n")
    except BlockingIOError:
        pass
    sink.write(["next"])
    said = os.read(reader, 65536).decode()
    assert f"({10_000 - received} lines left out" in said
    assert said.endswith("\nnext\n")
    os.close(reader)
    os.close(writer)


def test_lost_reader_is_no_error() -> None:
    reader, writer = os.pipe()
    sink = LineSink(writer)
    os.close(reader)
    sink.write(["one", "two"])
    sink.write(["three"])
    os.close(writer)
    assert not sink._is_open
