"""What is written follows the schema and comes from real switches; growth is judged as the aims say."""

from __future__ import annotations

import json
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
    groups_of,
    growth,
    main,
    peers_of,
    row_of,
)


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    text = json.loads((ROOT / "docs" / "schemas" / "switch_scale.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(text)
    return jsonschema.Draft202012Validator(text)


def row(ranks: int, switch_us: float, messages: int = 10, far: int = 0) -> Row:
    return Row(ranks=ranks, near_switch_us=switch_us, near_messages=messages, far_messages=far)


def sample(**changes: Any) -> Sample:
    facts: dict[str, Any] = {
        "prepare_us": 100.0, "commit_us": 10.0, "near_messages": 7, "far_messages": 0, "replaced": 2, "kept": 5,
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
    # Two links and a control channel. The leaver's last word may cross ours.
    assert all(13 <= one["near_messages"] <= 14 for one in written)
    printed = capsys.readouterr().out
    assert "2 links replaced, 6 kept" in printed  # 8 ranks: seven peers in the world, one more link in the pair
    assert "met    far_messages: 0" in printed


@pytest.mark.parametrize(
    "change", [{"ranks": 4}, {"near_switch_us": 0}, {"far_messages": -1}, {"near_messages": 0}, {"more": 1}]
)
def test_the_schema_refuses_other_rows(schema: jsonschema.Draft202012Validator, change: dict[str, Any]) -> None:
    good = {"ranks": 8, "near_switch_us": 1.5, "near_messages": 3, "far_messages": 0}
    schema.validate([good])
    with pytest.raises(jsonschema.ValidationError):
        schema.validate([{**good, **change}])


def test_growth_is_judged_between_the_smallest_and_the_largest_job() -> None:
    lines = growth([row(8, 100), row(64, 500), row(1024, 119)])
    assert [line.split()[0] for line in lines] == ["met", "met", "met"]
    lines = growth([row(8, 100), row(1024, 121, messages=13, far=1)])
    assert [line.split()[0] for line in lines] == ["MISSED", "MISSED", "MISSED"]


def test_a_row_takes_medians_of_times_and_the_most_messages() -> None:
    taken = Taken(samples=[sample(), sample(prepare_us=500.0), sample(commit_us=20.0, near_messages=8, far_messages=1)])
    assert row_of(8, taken) == row(8, 120.0, 8, 1)


def test_switches_that_touch_different_links_give_no_row() -> None:
    with pytest.raises(BenchError, match="differ from switch to switch"):
        row_of(8, Taken(samples=[sample(), sample(replaced=3)]))


def test_peers_are_few_and_mutual() -> None:
    assert peers_of(8, 3) == [0, 1, 2, 4, 5, 6, 7]
    assert len(peers_of(1024, 512)) == 19
    assert all(rank in peers_of(64, peer) for rank in range(64) for peer in peers_of(64, rank))
    assert all(len(ranks) == len(set(ranks)) for ranks in groups_of(64, 32).values())


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
