"""How long a rank waits in a switch. The lead waits shortest, so that its verdict comes before others give up."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.resilience.protocol.switch import Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchLimits:
    """In seconds. `transfer_s` is for the whole state of one rank."""

    transfer_s: float = 120.0
    slack_s: float = 15.0
    doubt_s: float = 300.0

    def of(self, wait: Wait) -> float:
        """The limit of one wait."""
        return {
            Wait.LEAD_DECIDES: self.transfer_s,
            Wait.LEAD_VERDICT: self.transfer_s + self.slack_s,
            Wait.LEAVER_VERDICT: self.transfer_s + 2 * self.slack_s,
            Wait.DOUBT: self.doubt_s,
        }[wait]
