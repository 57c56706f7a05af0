"""What a rank must know to go on where another process left off: its links, its clock. Travels with small state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import trainmover_ext
from megatron.resilience.worker.meter import Meter


class Handover:
    """`text` is trainmover_ext.handover() of the leaver rank; on the joiner rank, what go_live() is given.

    `meter` goes on from the leaver rank's boundary, so that the joiner rank knows what the switch cost.

    `generation` is given to a joiner alone: what go_live() would refuse in it is refused before there is a verdict.
    """

    def __init__(self, *, generation: int | None = None) -> None:
        self.text = ""
        self.meter = Meter()
        self._generation = generation

    def capture(self) -> dict[str, Any]:
        """For the small state."""
        return {"text": self.text, "meter": self.meter.capture(time.monotonic())}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Takes over what the leaver rank captured. Raises ValueError for what the links here cannot go on from."""
        text = values["text"]
        if self._generation is not None:
            try:
                trainmover_ext.check_handover(self._generation, text)
            except trainmover_ext.SwitchError as error:
                raise ValueError(str(error)) from error
        self.text = text
        self.meter.restore(values["meter"], time.monotonic())
