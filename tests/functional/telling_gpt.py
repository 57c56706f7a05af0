"""pretrain_gpt.py whose ranks tell at their end what they have loaded, started and opened: `--tell FOLDER`."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from pretrain_gpt import main

PRELOAD = ("megatron.training.preload", "megatron.training.pretrain")
FLAG = "--tell"


def told() -> dict[str, Any]:
    """Of this process."""
    import trainmover_ext

    return {
        "modules": sorted(name for name in sys.modules if name.startswith("megatron.resilience.")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "communicators": sorted(stats["name"] for stats in trainmover_ext.communicator_stats()),
    }


def tell_in(folder: Path) -> None:
    """From now on loops of this process do so, at their end."""
    import torch

    from megatron.training.loop import TrainingLoop

    finish = TrainingLoop.finish

    def finish_and_tell(self: TrainingLoop, *words: Any) -> None:
        finish(self, *words)
        (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(told()), encoding="utf-8")

    TrainingLoop.finish = finish_and_tell  # type: ignore[method-assign, assignment]


def run(argv: list[str]) -> int:
    place = argv.index(FLAG)
    tell_in(Path(argv[place + 1]))
    return main(argv[:place] + argv[place + 2 :])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
