"""What is written follows the schema and comes from real switches; growth is judged as the aims say."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks import switch_scale_bench
from benchmarks.switch_scale_bench import (
    ROOT,
    BenchError,
    Row,
    Sample,
    Taken,
    far_of,
    groups_of,
    growth,
    job_of,
    main,
    peers_of,
    row_of,
)


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    text = json.loads((ROOT / "docs" / "schemas" / "switch_scale.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(text)
    return jsonschema.Draft202012Validator(text)


def row(ranks: int, switch_us: float, messages: int = 10, **far: int) -> Row:
    figures = {**dict.fromkeys(("far_messages", "far_bytes", "far_connections", "far_table_bytes"), 0), **far}
    strangers = len(far_of(ranks, 0))
    return Row(ranks=ranks, near_switch_us=switch_us, near_messages=messages, far_ranks=strangers, **figures)


def sample(**changes: Any) -> Sample:
    facts: dict[str, Any] = {
        "prepare_us": 100.0, "commit_us": 10.0, "near_messages": 7, "far_messages": 0, "far_bytes": 0,
        "far_connections": 0, "far_table_bytes": 40, "replaced": 2, "kept": 5,
    }  # fmt: skip
    return Sample(**{**facts, **changes})


def test_two_sizes_are_measured_and_written_as_the_schema_says(
    tmp_path: Path, schema: jsonschema.Draft202012Validator, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench" / "switch_scale.json"
    assert main(["--quick", "--sizes", "8", "64", "--output", str(path)]) == 0
    written = json.loads(path.read_text())
    schema.validate(written)
    assert [one["ranks"] for one in written] == [8, 64]
    assert {one["far_messages"] for one in written} == {0}
    assert [one["far_ranks"] for one in written] == [0, 52], "up to 8 ranks all are linked to each other"
    assert written[0]["far_table_bytes"] == 0
    assert written[1]["far_table_bytes"] > 64 * 2 * 50, "two tables with a line for each rank"
    # Two links and a control channel. The leaver's last word may cross ours.
    assert all(13 <= one["near_messages"] <= 14 for one in written)
    printed = capsys.readouterr().out
    assert "2 links replaced, 6 kept" in printed  # 8 ranks: seven peers in the world, one more link in the pair
    assert "met    far_messages: 0" in printed


@pytest.mark.parametrize(
    "change", [{"ranks": 4}, {"near_switch_us": 0}, {"far_messages": -1}, {"near_messages": 0}, {"more": 1}]
)
def test_the_schema_refuses_other_rows(schema: jsonschema.Draft202012Validator, change: dict[str, Any]) -> None:
    good = asdict(row(8, 1.5, 3))
    schema.validate([good])
    with pytest.raises(jsonschema.ValidationError):
        schema.validate([{**good, **change}])


@pytest.mark.parametrize(
    ("rows", "marks"),
    [
        ([row(8, 100), row(64, 120), row(1024, 119, far_table_bytes=240_000)], ["met"] * 5),
        ([row(8, 100), row(64, 500), row(1024, 100)], ["MISSED", "met", "met", "met", "met"]),
        ([row(8, 100), row(64, 100, messages=13), row(1024, 100)], ["met", "MISSED", "met", "met", "met"]),
        ([row(8, 100), row(64, 100, far_messages=1)], ["met", "met", "MISSED", "met", "met"]),
        ([row(8, 100), row(64, 100, far_bytes=1)], ["met", "met", "met", "MISSED", "met"]),
        ([row(8, 100), row(64, 100, far_connections=1)], ["met", "met", "met", "met", "MISSED"]),
    ],
)
def test_growth_is_judged_by_the_worst_size(rows: list[Row], marks: list[str]) -> None:
    lines = growth(rows)
    assert [line.split()[0] for line in lines] == marks
    worst = max(rows, key=lambda one: one.near_switch_us)
    assert f"near_switch_us: {worst.ranks} ranks / 8 ranks" in lines[0]


def test_the_far_rank_has_no_link_to_the_leaver_and_all_links_of_its_own() -> None:
    with job_of(16) as job:
        assert job.far_rank is not None
        assert job.far_rank in far_of(16, job.leaver_rank)
        assert job.leaver_rank not in job.ranks[job.far_rank].runtime.linked_ranks()
        assert job.near_rank in job.ranks[job.far_rank].runtime.linked_ranks()
        here = {rank for rank in job.ranks if rank in peers_of(16, job.far_rank)}
        assert set(job.ranks[job.far_rank].runtime.linked_ranks()) == here
        assert {rank.rank for rank in job.stayers()} == set(job.ranks[job.leaver_rank].runtime.linked_ranks())
    with job_of(8) as job:
        assert job.far_rank is None


def test_what_a_rank_that_is_linked_to_the_leaver_hears_would_be_seen() -> None:
    with job_of(16) as job:
        assert job.move().far_messages == 0
        job.far_rank = job.leaver_rank + 1
        taken = job.move()
        assert taken.far_messages > 5
        assert taken.far_connections > 0


def test_a_row_takes_medians_of_times_and_the_most_messages() -> None:
    samples = [sample(), sample(prepare_us=500.0), sample(commit_us=20.0, near_messages=8, far_messages=1, far_bytes=2)]
    expected = row(16, 120.0, 8, far_messages=1, far_bytes=2, far_table_bytes=40)
    assert row_of(16, Taken(samples=samples)) == expected


def test_switches_that_touch_different_links_give_no_row() -> None:
    with pytest.raises(BenchError, match="differ from switch to switch"):
        row_of(8, Taken(samples=[sample(), sample(replaced=3)]))


def test_peers_are_few_and_mutual() -> None:
    assert peers_of(8, 3) == [0, 1, 2, 4, 5, 6, 7]
    assert len(peers_of(1024, 512)) == 19
    assert all(rank in peers_of(64, peer) for rank in range(64) for peer in peers_of(64, rank))
    assert all(len(ranks) == len(set(ranks)) for ranks in groups_of(64, 32).values())


def test_a_missed_aim_is_an_error_if_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(switch_scale_bench, "measure", lambda *_: [row(8, 100), row(64, 500)])
    words = ["--output", str(tmp_path / "switch_scale.json")]
    assert [main(words), main([*words, "--strict"])] == [0, 1]


def test_a_switch_that_breaks_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(*_: object) -> list[Row]:
        raise BenchError("generation 2 is broken: a test")

    monkeypatch.setattr(switch_scale_bench, "measure", breaks)
    path = tmp_path / "switch_scale.json"
    assert main(["--output", str(path)]) == 1
    assert "broken: a test" in capsys.readouterr().err
    assert not path.exists()
