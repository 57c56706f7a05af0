"""A rank of test_backend_operations.py: run_operations.py RANK SIZE STORE_FILE RESULT_FILE.

Writes {name of check: "ok" or traceback} as JSON.
"""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tests.unit.trainmover_ext import operations  # noqa: F401  (registers its checks)
from tests.unit.trainmover_ext.given import CHECKS


def run_all(rank: int, ranks: int, store_file: str) -> dict[str, str]:
    results: dict[str, str] = {}
    for checks in (CHECKS, {"anew": CHECKS["objects_travel"]}):
        store = FileStore(store_file, ranks)
        dist.init_process_group("trainmover", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        for name, function in checks.items():
            try:
                function()
                results[name] = "ok"
            except Exception:  # noqa: BLE001  (reported by the test, with its traceback)
                results[name] = traceback.format_exc()
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = run_all(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    Path(sys.argv[4]).write_text(json.dumps(found))
