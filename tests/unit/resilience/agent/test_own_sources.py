"""Digests of our own files: every source counts, and what is told is what is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import trainmover_ext
from megatron.resilience.agent import own_sources as module
from megatron.resilience.agent.own_sources import folder_lines, own_sources


def test_all_of_our_packages_and_the_extension_are_told() -> None:
    names = [line.partition("=")[0] for line in own_sources().splitlines()]
    assert len(set(names)) == len(names)
    for name in ("megatron/training", "megatron/training/config", "megatron/resilience/worker", "trainmover_ext"):
        assert name in names
    assert names[-1] in [path.name for path in Path(trainmover_ext.__file__).parent.glob("_C.*.so")]


def test_a_byte_a_name_and_a_new_file_count_in_their_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "part" / "b.py").write_text("b = 1\n")
    (tmp_path / "notes.txt").write_text("not a source\n")
    before = folder_lines(tmp_path, "pack")
    assert [line.partition("=")[0] for line in before] == ["pack", "pack/part"]

    def changed() -> list[bool]:
        return [line != was for line, was in zip(folder_lines(tmp_path, "pack"), before, strict=True)]

    (tmp_path / "notes.txt").write_text("another\n")
    assert changed() == [False, False]
    (tmp_path / "part" / "b.py").write_text("b = 2\n")
    assert changed() == [False, True]
    (tmp_path / "part" / "b.py").write_text("b = 1\n")
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    assert changed() == [True, False]
    (tmp_path / "c.py").rename(tmp_path / "a.py")
    assert changed() == [False, False]
    (tmp_path / "part" / "c.py").write_text("")
    assert changed() == [False, True]


def test_it_imports_neither_torch_nor_what_it_reads() -> None:
    program = f"import sys; from {module.__name__} import own_sources; own_sources(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "trainmover_ext", "megatron.training"}
