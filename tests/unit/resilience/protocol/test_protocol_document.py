"""docs/protocol.md says what the code does: tables, messages with their fields, entries, and files that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from megatron.resilience.protocol import joiner, leaver, stayer, switch_drive
from megatron.resilience.protocol.journal import AnyEntry
from megatron.resilience.protocol.messages import ROUTES, route_types

ROOT = Path(__file__).parents[4]
TEXT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def drawn() -> list[set[tuple[str, ...]]]:
    blocks = re.findall(r"^```\n((?:State|Phase) .*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    return [{tuple(line.split()[:3]) for line in block.splitlines()[1:]} for block in blocks]


def test_transition_tables_are_those_of_the_code() -> None:
    coded = [
        {(at.name, trigger.name, to.name) for (at, trigger), to in stayer.TRANSITIONS.items()},
        {(at.name, trigger.name, to.name) for (at, trigger), to in leaver.TRANSITIONS.items()},
        {(at.name, trigger.name, to.name) for (at, trigger), to in joiner.TRANSITIONS.items()},
        {(at.name, event, to.name) for (at, event), to in switch_drive.TRANSITIONS.items()},
    ]
    assert drawn() == coded


def test_messages_stand_there_with_their_fields() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\w, -]+) \|", TEXT, flags=re.MULTILINE))
    coded = {one.__name__: ", ".join(one.__struct_fields__) or "-" for route in ROUTES for one in route_types(route)}
    assert listed == coded


def test_every_journal_entry_is_explained() -> None:
    section = TEXT.split("## The journal")[1].split("##")[0]
    assert set(re.findall(r"\b(?:Job|Command|Switch)[A-Z]\w+", section)) == {one.__name__ for one in get_args(AnyEntry)}


def test_files_that_are_named_exist() -> None:
    named = set(re.findall(r"`(\w+\.py)`", TEXT))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "megatron/resilience/protocol" / name).is_file()] == []
