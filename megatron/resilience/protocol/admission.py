"""Which agents belong to a job: what one says of itself is compared with what the controller was told."""

from __future__ import annotations

from megatron.resilience.protocol.controller_words import JobSpec
from megatron.resilience.protocol.messages import AgentHello


def not_ours(hello: AgentHello, spec: JobSpec) -> str:
    """What of `hello` is not as in this job, and what to do; empty if all is."""
    found_ranks = hello.capacity.ranks
    needed_ranks = found_ranks if hello.elastic else max(found_ranks, spec.ranks_per_machine)
    flag = "--ranks-per-machine"
    for found, expected, cure in (
        (f"job {hello.job}", f"job {spec.job}", "set TRAINMOVER_JOB, or TRAINMOVER_CONTROLLER"),
        (f"--machines {hello.machines}", f"--machines {spec.slots}", "pass that"),
        (f"{flag} {hello.ranks_per_machine}", f"{flag} {spec.ranks_per_machine}", "pass that"),
        (f"room for {found_ranks} ranks", f"room for {needed_ranks} ranks", f"pass --capacity-ranks {needed_ranks}"),
    ):
        if found != expected:
            return f"found {found} on machine {hello.machine_id}, expected {expected}; {cure}"
    return ""
