"""Build of the package: metadata lives in pyproject.toml; here is its one C++ extension, trainmover_ext._C, from csrc/.

Incremental: ninja compiles what changed since the last build (build/extension), two files at a time unless MAX_JOBS
says otherwise.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

ROOT = Path(__file__).resolve().parent


def extension() -> Extension:
    """All of csrc/ in one. Only csrc/torch includes torch, whose headers are excused from our warnings."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cc"))
    headers = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h"))
    system = [word for path in include_paths() for word in ("-isystem", path)]
    return CppExtension(
        name="trainmover_ext._C",
        sources=sources,
        depends=headers,
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=[
            "-O3",
            "-g0",
            "-std=c++17",
            "-fvisibility=hidden",
            "-ffp-contract=off",  # the bits of a sum must not depend on the compiler's mood
            "-Wall",
            "-Wextra",
            "-Werror",
            *system,
        ],
    )


class KeptBuild(BuildExtension):  # type: ignore[misc]
    """Keeps the object files where the next build finds them: pip's editable installs would take a folder that goes."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / "extension")


os.environ.setdefault("MAX_JOBS", "2")
# ninja lies beside this Python, also when its environment is not activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

setup(ext_modules=[extension()], cmdclass={"build_ext": KeptBuild})
