"""What all messages have in common."""

from __future__ import annotations

import msgspec


class MessageError(Exception):
    """Bytes that are no message which the other side may send."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="message", forbid_unknown_fields=True):
    """Base of all messages."""
