"""What the links of a rank must know to go on where another process left off. Travels with its small state."""

from __future__ import annotations

from collections.abc import Mapping


class Handover:
    """`text` is trainmover_ext.handover() of the leaver rank; on the joiner rank, what go_live() is given."""

    def __init__(self) -> None:
        self.text = ""

    def capture(self) -> dict[str, str]:
        """For the small state."""
        return {"text": self.text}

    def restore(self, values: Mapping[str, str]) -> None:
        """Takes over what the leaver rank captured."""
        self.text = values["text"]
