"""The event log: a line each, in order, whole again after a crash in the middle of one."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.resilience.controller.event_log import EventLog
from megatron.resilience.protocol.controller_words import Record


def record(name: str) -> Record:
    return Record(kind="INSTANT", incident_id="g2", name=name, time_ms=1234.56789, text='say "it"\nnow')


def test_each_record_is_one_json_line_and_files_are_continued(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for name in ("one", "two"):
        log = EventLog(path)
        log.open()
        log.write(record(name))
        log.close()
        log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["one", "two"]
    assert lines[0] == {"kind": "INSTANT", "id": "g2", "name": "one", "time_ms": 1234.568, "text": 'say "it"\nnow'}
    assert path.stat().st_mode & 0o777 == 0o600


def test_line_that_a_crash_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "BEG')
    log = EventLog(path)
    log.open()
    log.write(record("after"))
    log.close()
    lines = path.read_text().splitlines()
    assert lines[0] == '{"kind": "BEG'
    assert json.loads(lines[1])["name"] == "after"
