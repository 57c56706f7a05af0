"""Errors of the data plane, raised by torch.distributed calls over it too. csrc/torch/python_errors.cc makes them.

Each says what was found, what was expected and what to do. No imports: the extension looks the classes up here.
"""

from __future__ import annotations

__all__ = [
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "HandshakeRefused",
    "PeerLost",
    "SwitchError",
    "TransportError",
]


class CollectiveError(RuntimeError):
    """Base of all below."""


class PeerLost(CollectiveError):  # noqa: N818  (the name that C++, documents and launcher use)
    """The process of `global_rank` died or left while this operation waited for it directly."""

    def __init__(self, message: str, global_rank: int) -> None:
        super().__init__(message, global_rank)
        self.global_rank = global_rank

    def __str__(self) -> str:
        return str(self.args[0])


class CollectiveAborted(CollectiveError):  # noqa: N818
    """Operations of `generation` were aborted, by a call here or because `culprit` (a global rank) was lost."""

    def __init__(self, message: str, generation: int, culprit: int | None) -> None:
        super().__init__(message, generation, culprit)
        self.generation = generation
        self.culprit = culprit

    def __str__(self) -> str:
        message = str(self.args[0])
        if self.culprit is None or f"global rank {self.culprit}" in message:
            return message
        return f"{message} (global rank {self.culprit})"


class CollectiveTimeout(CollectiveError):  # noqa: N818
    """A peer gave no sign of life for the limit, or an operation did not end within its own time-out."""


class CollectiveMismatch(CollectiveError):  # noqa: N818
    """Ranks of one communicator did not make the same call: other operation, size, type or root."""


class TransportError(CollectiveError):
    """A system call on a link, segment or listener failed for a reason that is not the peer's death."""


class HandshakeRefused(CollectiveError):  # noqa: N818
    """The other side said no for good: another job, other constants, not the rank we took it for."""


class SwitchError(CollectiveError):
    """A link was to be prepared, committed or aborted out of turn; nothing was changed."""
