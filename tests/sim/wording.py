"""How messages are written in transcripts."""

from __future__ import annotations

from megatron.resilience.protocol.messages import Built, WorkerHello


def short(message: object) -> str:
    """A message on one line, without what is long or said by the rest."""
    if isinstance(message, WorkerHello | Built):
        return f"{type(message).__name__}(g{message.generation})"
    fields: list[str] = []
    for name in getattr(message, "__struct_fields__", ()):
        value = getattr(message, name)
        if name == "generation":
            fields.insert(0, f"g{value}")
        elif name not in ("facts", "endpoints", "term", "slot_generations", "peak", "peak_bytes") and value not in (
            "",
            (),
        ):
            fields.append(f"{name}={value}")
    return f"{type(message).__name__}({', '.join(fields)})"
