"""The training loop's own counters as part of a rank's state. Handed to `take_inventory()` with what is trained.

Which samples come next is a function of the consumed ones (samplers.py), so iterators have no state beside these.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.training.checkpointing import Progress


class _Counts(Protocol):
    def capture(self) -> dict[str, Any]: ...

    def restore(self, values: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBookkeeping:
    """Progress, log interval, saves, ending and links of one rank; `progress` is changed in place."""

    progress: Progress
    reporter: _Counts
    checkpointer: _Counts
    watch: _Counts
    links: _Counts
    """Where each communicator stands in its order of operations."""

    def capture(self) -> dict[str, Any]:
        """All of it, as numbers and words."""
        return {
            "progress": dataclasses.asdict(self.progress),
            **{name: part.capture() for name, part in self._parts().items()},
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Takes over what another rank captured. Raises ValueError, nothing changed, for another release's."""
        here = self.capture()
        for name, part in here.items():
            found = values.get(name)
            if not isinstance(found, dict) or found.keys() != part.keys():
                raise ValueError(
                    f"found {name} {found!r}, expected {sorted(part)}; do both ranks run the same release?"
                )
        self.links.restore(values["links"])  # the one that may refuse what it is given: before anything is changed
        for name, value in values["progress"].items():
            setattr(self.progress, name, value)
        for name, part in self._parts().items():
            if part is not self.links:
                part.restore(values[name])

    def _parts(self) -> dict[str, _Counts]:
        return {
            "reporter": self.reporter,
            "checkpointer": self.checkpointer,
            "watch": self.watch,
            "links": self.links,
        }
