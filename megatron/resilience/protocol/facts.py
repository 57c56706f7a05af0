"""What must be equal on two machines, or the bits of training would differ after one took the other's place.

Agents tell in their hello what can be known without torch, ranks tell all of it when they are built; the controller
compares. A fact is text, of one line or of many: then the first line that differs is shown.
"""

from __future__ import annotations

import msgspec

SHOWN_CHARACTERS_MAX = 160
"""Of one side of one difference."""


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions and properties that change bits. Empty means not known on this side, and is not compared."""

    torch: str = ""
    megatron_core: str = ""
    trainmover: str = ""
    sources: str = ""
    """Digests of trainmover's own files, one a line."""
    cpu_capability: str = ""
    """As torch names it, e.g. AVX2."""
    processor: str = ""
    """Vendor, family, model, name, and extensions that libraries choose kernels by: not compared, shown."""
    threads: str = ""
    """Threads of one rank's arithmetic."""
    gpu: str = ""
    math_library: str = ""
    """How torch was built and with which libraries, one property a line."""
    variables: str = ""
    """Of the environment, those that steer arithmetic, one a line; `none` if there are none."""
    arithmetic: str = ""
    """Digests of small calculations, one a line; told by ranks."""
    model_digest: str = ""
    """Of the resolved configuration of model, optimizer, layout and data; told by ranks."""
    settings: str = ""
    """What `model_digest` is of, as far as it is not the default, one setting a line: not compared, shown."""
    data: str = ""
    """Files that are read, without their folders: size and checksum, one a line; told by ranks."""
    script: str = ""
    """Name and digest of the script that the ranks run."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine can hold."""

    ranks: int
    memory_bytes: int


NAMES = {
    "torch": "torch",
    "megatron_core": "megatron-core",
    "trainmover": "trainmover",
    "sources": "trainmover's files",
    "cpu_capability": "CPU capability",
    "threads": "number of threads",
    "gpu": "GPU",
    "math_library": "math library",
    "variables": "variables of the environment",
    "arithmetic": "arithmetic",
    "model_digest": "model configuration",
    "data": "data",
    "script": "script",
}
"""Facts that are compared, and what they are called."""

_SHOWN_BY = {"model_digest": "settings"}
"""A fact that nobody can read -> the one that tells what it is of."""

_ADVICE = {
    "torch": "install the job's version there",
    "megatron_core": "install the job's version there",
    "trainmover": "install the job's version there",
    "sources": "install the job's checkout there, as it was when the job began, with the same built extension",
    "cpu_capability": "take a machine with such a processor, or start the job with ATEN_CPU_CAPABILITY that all have",
    "threads": "set OMP_NUM_THREADS there to the job's",
    "gpu": "take a machine with such a GPU",
    "math_library": "install the job's build of torch there",
    "variables": "start its agent with the job's",
    "arithmetic": "take a machine with such a processor, or start the job with variables that make all compute alike",
    "model_digest": "start its agent with the job's command line and files",
    "data": "copy the job's files there",
    "script": "copy the job's script there, as it was when the job began",
}


def differences(found: Facts, expected: Facts) -> tuple[str, ...]:
    """One text for each fact in which `found` (a joiner's) differs from `expected` (the job's), with what to do."""
    texts = []
    for field, name in NAMES.items():
        ours, theirs = getattr(found, field), getattr(expected, field)
        if ours and theirs and ours != theirs:
            shown = _SHOWN_BY.get(field, field)
            contrast = contrast_of(getattr(found, shown), getattr(expected, shown)) or contrast_of(ours, theirs)
            texts.append(f"{name}: {contrast} ({_ADVICE[field]}{_processors(field, found, expected)})")
    return tuple(texts)


def _processors(field: str, found: Facts, expected: Facts) -> str:
    """Two models of processor may well compute alike, so that alone is no difference; where they do not, it is told."""
    if field not in ("cpu_capability", "arithmetic") or not (found.processor and expected.processor):
        return ""
    if found.processor == expected.processor:
        return f"; both have the processor {found.processor}"
    return f"; its processor is {found.processor}, the job's {expected.processor}"


def contrast_of(found: str, expected: str) -> str:
    """`found X, the job runs Y`: the first lines that differ, by name where a line is `name=value`. Empty if none."""
    ours, theirs = _lines(found), _lines(expected)
    only_ours = [line for line in ours if line not in set(theirs)]
    only_theirs = [line for line in theirs if line not in set(ours)]
    if not only_ours and not only_theirs:
        return "" if found == expected else "found the same in another order"
    names = list(dict.fromkeys(_name(line) for line in (*only_ours, *only_theirs)))
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    mine, other = _cut(_of(names[0], only_ours), _of(names[0], only_theirs))
    return f"found {mine}, the job runs {other}{more}"


def _lines(text: str) -> list[str]:
    return [] if text == "none" else text.splitlines()


def _name(line: str) -> str:
    """Lines without a name are alike: the first of one side is shown with the first of the other."""
    return line.partition("=")[0] if "=" in line else ""


def _of(name: str, lines: list[str]) -> str:
    return next((line for line in lines if _name(line) == name), f"no {name}" if name else "none")


def _cut(first: str, second: str) -> tuple[str, str]:
    """Both, short enough to be read; of long ones the word in which they differ, and what follows."""
    if max(len(first), len(second)) <= SHOWN_CHARACTERS_MAX:
        return first, second
    alike = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    start = first.rfind(" ", 0, alike) + 1
    return _piece(first, start), _piece(second, start)


def _piece(line: str, start: int) -> str:
    end = start + SHOWN_CHARACTERS_MAX
    return f"{'...' if start else ''}{line[start:end]}{'...' if end < len(line) else ''}"
