"""How long a rank waits in a switch. The lead waits shortest, so that its verdict comes before others give up.

A rank's state gets time by its size. Who waits for other ranks' states does not know their sizes, and waits as long as
any may take; that is bounded by what far ranks, which wait in a collective meanwhile, will bear.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.resilience.protocol.switch import Wait

_MOST_S = 800.0
"""The controller stops the job when nobody runs for `Limits.running_ms`: that is longer than all of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchLimits:
    """In seconds. One rank's state gets `least_s`, or what it takes at `bytes_per_s`, and never more than `most_s`."""

    least_s: float = 120.0
    most_s: float = 540.0
    bytes_per_s: float = 100e6
    slack_s: float = 15.0
    release_s: float = 3600.0
    """For a leaver, after LEAVE, to be released. Only a controller that never comes back lets it pass."""

    @classmethod
    def within(cls, collective_s: float) -> SwitchLimits:
        """For a job whose collectives are given up after `collective_s` (--distributed-timeout-minutes)."""
        limits = cls()
        most_s = min(_MOST_S, collective_s - 4 * limits.slack_s)
        return cls(most_s=max(limits.least_s, most_s))

    def of_state(self, total_bytes: int) -> float:
        """For the whole state of one rank."""
        return min(self.most_s, max(self.least_s, total_bytes / self.bytes_per_s))

    def of(self, wait: Wait) -> float:
        """The limit of one wait."""
        return {
            Wait.LEAD_DECIDES: self.most_s,
            Wait.LEAD_VERDICT: self.most_s + self.slack_s,
            Wait.LEAVER_VERDICT: self.most_s + 2 * self.slack_s,
            Wait.DOUBT: max(300.0, self.most_s + 3 * self.slack_s),
        }[wait]
