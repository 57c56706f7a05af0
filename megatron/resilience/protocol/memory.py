"""Whether a machine has memory for ranks that have trained elsewhere: what they needed there, what it has left here.

A leaver rank tells what it has needed at its peak, activations and links included; a joiner rank, which has built the
model and not trained yet, what it holds and what its machine has besides. Bytes; 0 where that is not known.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

_GIB = 1 << 30


class Peak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that a rank has held so far, of its machine's memory and of its device's."""

    host_bytes: int = 0
    device_bytes: int = 0


class Room(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank holds now, and what it and others there could still have."""

    host_held_bytes: int = 0
    host_free_bytes: int = 0
    device_held_bytes: int = 0
    device_free_bytes: int = 0


def shortage(ranks: Iterable[tuple[Peak, Room]]) -> str:
    """Why ranks of one machine do not fit there, with what they need and what there is; empty if they do.

    They share the machine's memory, each has its device for itself. What they hold already counts on both sides, also
    what they hold together.
    """
    pairs = list(ranks)
    on_host = [(peak, room) for peak, room in pairs if peak.host_bytes and room.host_free_bytes]
    growth = sum(max(0, peak.host_bytes - room.host_held_bytes) for peak, room in on_host)
    free = min((room.host_free_bytes for _, room in on_host), default=0)
    if growth > free:
        needed = sum(peak.host_bytes for peak, _ in on_host)
        return f"memory: its ranks will need {_text(needed)}, {_text(growth)} more than now, and {_text(free)} is free"
    for peak, room in pairs:
        growth = peak.device_bytes - room.device_held_bytes
        if room.device_free_bytes and growth > room.device_free_bytes:
            needs, left = _text(peak.device_bytes), _text(room.device_free_bytes)
            return f"memory of a device: its rank will need {needs}, {_text(growth)} more than now, and {left} is free"
    return ""


def _text(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB // 100 else f"{count} bytes"
