"""Prints docs/flags.md: every flag that is known, with its default and meaning, or why it is ignored or refused.

Run by hand after a flag has changed: `python scripts/flags_table.py > docs/flags.md`. A test compares the two.
It imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from megatron.training.config import SUBJECTS
from megatron.training.config.flag import FlagSpec, flags_of
from megatron.training.megatron_flags import MEGATRON_FLAGS, Takes, Verdict

_INTRODUCTION = """# Flags

The flags of `pretrain_gpt.py` have the names, meanings and defaults of Megatron-LM's. A `--yaml-cfg` file may give the
same settings; flags on the command line win. Any flag that is not below is an error that names the nearest one.

This file is the output of `scripts/flags_table.py`.
"""

_VALUES = {Takes.NONE: "", Takes.ONE: " VALUE", Takes.OPTIONAL_ONE: " [VALUE]", Takes.MANY: " VALUE ..."}


def flags_table() -> str:
    """The whole of docs/flags.md."""
    lines = [_INTRODUCTION]
    for subject, settings_type in SUBJECTS.items():
        rows = ((_names(spec), _default(spec), _meaning(spec)) for spec in flags_of(settings_type))
        lines += [f"## {subject.capitalize()}\n", (settings_type.__doc__ or "").strip() + "\n"]
        lines += [*_table(("Flag", "Default", "Meaning"), rows), ""]
    for verdict, title, words in (
        (
            Verdict.IGNORED,
            "Ignored",
            "Flags of Megatron-LM without which the same model is trained. Each gives a warning.",
        ),
        (
            Verdict.REFUSED,
            "Refused",
            "Flags of Megatron-LM without which another model would be trained. Each is an error.",
        ),
    ):
        foreign = ((name, MEGATRON_FLAGS[name]) for name in sorted(MEGATRON_FLAGS))
        listed = ((f"`{name}{_VALUES[flag.takes]}`", flag.reason) for name, flag in foreign if flag.verdict is verdict)
        lines += [f"## {title}\n", words + "\n", *_table(("Flag", "Reason"), listed), ""]
    return "\n".join(lines).rstrip() + "\n"


def _names(spec: FlagSpec) -> str:
    value = "" if spec.is_switch else " " + spec.value_type.__name__.upper() + (" ..." if spec.many else "")
    return ", ".join(f"`{name}{value}`" for name in spec.names)


def _default(spec: FlagSpec) -> str:
    if spec.is_switch:
        return ""
    return "" if spec.default is None else f"`{spec.default}`"


def _meaning(spec: FlagSpec) -> str:
    choices = f" One of {', '.join(f'`{choice}`' for choice in spec.choices)}." if spec.choices else ""
    return spec.help + choices


def _table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"


if __name__ == "__main__":
    sys.stdout.write(flags_table())
