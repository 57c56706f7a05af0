"""Errors of a rank's state and its transfer. Each says what was found, what was expected and what to do."""

from __future__ import annotations


class StateError(RuntimeError):
    """A rank's state is not as it should be between two iterations, or does not fit the rank that takes it over."""


class TransferError(StateError):
    """State did not get from the leaver rank to the joiner rank."""


class TransferTimeout(TransferError):  # noqa: N818  (named as the data plane's own errors are)
    """The limit is over; the other side may be dead, cut off or slow."""


class TransferCancelled(TransferError):  # noqa: N818
    """The caller asked to stop."""


class TransferRefused(TransferError):  # noqa: N818
    """The other side said no for good, or could not use what it was given."""


class LeaverStays(TransferError):  # noqa: N818
    """The leaver decided to stay before its state was over; nothing of what came may be used."""


class WireError(TransferError):
    """Bytes that are not our protocol, not signed with the job's token, or damaged. The connection is of no use."""
