"""Forks whole jobs from one process that has imported everything, so that sixty jobs cost one import.

Started by the `jobs` fixture. Reads one JSON request a line on stdin: {"argv", "world_size", "folder"}; forks a rank a
number, each with its output in `folder/rank-N.log`; answers {"exit_codes"} when all have ended. When one fails, the
others get `GRACE_S` to end by themselves and are killed then: a job never outlives its answer.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import pretrain_gpt
from megatron.training import preload, pretrain  # noqa: F401  (imported once, before any fork)

GRACE_S = 5.0
JOB_LIMIT_S = 300.0


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        codes = run_job(request["argv"], request["world_size"], Path(request["folder"]))
        print(json.dumps({"exit_codes": codes}), flush=True)


def run_job(argv: list[str], world_size: int, folder: Path) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = [start_rank(argv, rank, world_size, port, folder) for rank in range(world_size)]
    return wait_for(pids)


def start_rank(argv: list[str], rank: int, world_size: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    log = os.open(folder / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    code = 1
    try:
        code = pretrain_gpt.main(argv)
    except BaseException:  # noqa: BLE001  (the edge of a rank's process)
        traceback.print_exc()
    sys.exit(code)  # as a rank of a real job ends: what it has made in passing goes with it


def wait_for(pids: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + JOB_LIMIT_S
    descriptors = {os.pidfd_open(pid): pid for pid in pids}
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    while len(codes) < len(pids):
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        for descriptor, _ in ready:
            poll.unregister(descriptor)
            pid = descriptors[descriptor]
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(descriptor)
            if codes[pid]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if not ready:
            for pid in pids:
                if pid not in codes:
                    os.killpg(pid, signal.SIGKILL)
            deadline = time.monotonic() + GRACE_S
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)  # helpers that a failed rank left
        except ProcessLookupError:
            continue
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main()
