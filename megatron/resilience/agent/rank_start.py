"""Starts one rank: a fork of the spawner that runs the script as `__main__`, or a separate `python SCRIPT`.

Called by the spawner. Either way the rank is killed by the kernel if its spawner dies, leads a process group of its
own (so that its helpers can be found), and has one pipe for all it prints. A forked rank also tells its spawner
when it raises, with the time and the words of the exception, before it begins to unwind.
"""

from __future__ import annotations

import builtins
import enum
import io
import json
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader

from megatron.resilience.agent.environment import inherited_environment, install_environment
from megatron.resilience.agent.failure import EXIT_FAILURE, shorten
from megatron.resilience.agent.process_tree import name_process, set_parent_death_signal

_DETAILS_CHARACTERS_MAX = 4000


class StartMode(enum.StrEnum):
    """How ranks come to be."""

    FORK = "fork"
    EXEC = "exec"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank runs."""

    global_rank: int
    script: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    start: StartMode


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRank:
    """A running rank, as its spawner holds it."""

    global_rank: int
    pid: int
    output: int
    """Reading end of its standard output and error."""
    report: int
    """Reading end of its exception report; nothing comes in exec mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDuty:
    """In the forked child: what is left to do once the spawner's stack has been unwound."""

    plan: RankPlan
    report: int

    def run(self) -> int:
        """Runs the script; returns the exit code, or raises SystemExit as the script did."""
        return _run_script(self.plan, self.report)


def start_rank(
    plan: RankPlan, *, close_in_child: Iterable[int], in_child: Callable[[], None]
) -> StartedRank | RankDuty:
    """Forks. The parent gets a StartedRank; a child in fork mode a RankDuty that it must run and then exit.

    `close_in_child` are the spawner's descriptors; `in_child()` restores signal handlers. Signals must be blocked.
    """
    output_reader, output_writer = os.pipe2(os.O_CLOEXEC)
    report_reader, report_writer = os.pipe2(os.O_CLOEXEC)
    spawner_pid = os.getpid()
    pid = os.fork()
    if pid:
        os.close(output_writer)
        os.close(report_writer)
        os.set_blocking(output_reader, False)
        os.set_blocking(report_reader, False)
        return StartedRank(global_rank=plan.global_rank, pid=pid, output=output_reader, report=report_reader)
    os.setpgid(0, 0)
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != spawner_pid:
        os._exit(EXIT_FAILURE)
    in_child()
    for descriptor in (*close_in_child, output_reader, report_reader):
        os.close(descriptor)
    _redirect(output_writer)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if plan.start is StartMode.EXEC:
        _exec_script(plan)
    install_environment(dict(plan.environment))
    name_process(f"rank {plan.global_rank}")
    return RankDuty(plan=plan, report=report_writer)


def _redirect(output: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)


def _exec_script(plan: RankPlan) -> None:
    environment = {**inherited_environment(), **dict(plan.environment)}
    try:
        os.execve(sys.executable, [sys.executable, plan.script, *plan.arguments], environment)
    except OSError as error:
        os.write(2, f"{sys.executable}: {error.strerror}\n".encode())
    os._exit(EXIT_FAILURE)


def _run_script(plan: RankPlan, report: int) -> int:
    """As `python SCRIPT ARGS` does it, and so that multiprocessing's spawned children find the script again."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=True)
    sys.argv[:] = [plan.script, *plan.arguments]
    path = os.path.abspath(plan.script)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __cached__=None, __builtins__=builtins)
    module.__loader__ = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except SystemExit as stop:
        if not isinstance(stop.code, int | None):
            _report_exception(report, stop, str(stop.code))
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the edge of the process: whatever it is, it is told and printed
        _report_exception(report, error, "".join(traceback.format_exception_only(type(error), error)))
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return EXIT_FAILURE
    return 0


def _report_exception(report: int, error: BaseException, text: str) -> None:
    # A syntax error's own words are its last line; all others' are the first, C++ stacks may follow.
    lines = text.strip().splitlines() or [type(error).__name__]
    first = lines[-1] if isinstance(error, SyntaxError) else lines[0]
    message = {"time_s": time.monotonic(), "exception": shorten(first), "details": text[:_DETAILS_CHARACTERS_MAX]}
    try:
        os.write(report, json.dumps(message).encode() + b"\n")
    except OSError:
        return  # the spawner has gone, and so shall we
