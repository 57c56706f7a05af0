"""Claims about the checks of indexed datasets, `--data-path` and `--split`; megatron-core is the reference."""

import math
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron.training import data_files
from megatron.training.data_files import (
    HEADER,
    DataError,
    IndexedDatasetSummary,
    check_indexed_dataset,
    fit_split,
    parse_blend,
    parse_split,
    split_counts,
)
from megatron.training.indexed_writer import IndexedWriter

DOCUMENTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
BOUNDS_AT = HEADER.size + 12 * len(DOCUMENTS)


def write_dataset(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: str = "uint16") -> Path:
    with IndexedWriter(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def damage(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(bytes(content))


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "lib_text_document")


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64"])
def test_a_whole_dataset_is_summed_up(tmp_path: Path, dtype: str) -> None:
    prefix = write_dataset(tmp_path / "d", dtype=dtype)
    expected = IndexedDatasetSummary(documents=4, sequences=4, tokens=10, dtype=dtype)
    assert check_indexed_dataset(prefix) == expected
    assert check_indexed_dataset(str(prefix)) == expected


def test_documents_of_several_sequences_are_counted_apart(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d.bin", tmp_path / "d.idx", "int32") as writer:
        writer.add_document([1, 2], [3], [4])
        writer.add_document([5])
    expected = IndexedDatasetSummary(documents=2, sequences=4, tokens=5, dtype="int32")
    assert check_indexed_dataset(tmp_path / "d") == expected


def test_a_long_index_is_checked_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_dataset(tmp_path / "d", [[1, 2]] * 11)
    monkeypatch.setattr(data_files, "_SEQUENCES_A_STEP", 3)
    assert check_indexed_dataset(prefix).tokens == 22
    damage(tmp_path / "d.idx", HEADER.size + 12 * 11 + 8 * 6, struct.pack("<q", 2))  # falls from one part to the next
    with pytest.raises(DataError, match="do not rise"):
        check_indexed_dataset(prefix)


def test_modes_at_the_end_of_the_index_are_accepted(prefix: Path) -> None:
    idx = Path(f"{prefix}.idx")
    idx.write_bytes(idx.read_bytes() + bytes(len(DOCUMENTS)))
    assert check_indexed_dataset(prefix).documents == 4


@pytest.mark.parametrize(("suffix", "other"), [(".bin", ".idx"), (".idx", ".bin")])
def test_half_a_dataset_names_the_missing_half(prefix: Path, suffix: str, other: str) -> None:
    Path(f"{prefix}{suffix}").unlink()
    with pytest.raises(DataError, match=rf"found .*{other} but no lib_text_document\{suffix}"):
        check_indexed_dataset(prefix)


@pytest.mark.parametrize("wrong", ["lib", "lib_text", "libb_text_document", "lib_txet_document"])
def test_a_wrong_prefix_is_answered_with_the_nearest(prefix: Path, wrong: str) -> None:
    write_dataset(prefix.with_name("lab"))
    with pytest.raises(DataError, match=f"nearest one there is {prefix}$"):
        check_indexed_dataset(prefix.with_name(wrong))


def test_nothing_is_suggested_that_is_half_a_dataset(prefix: Path) -> None:
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(DataError, match="holds no dataset"):
        check_indexed_dataset(prefix.with_name("other"))


def test_a_suffix_in_the_prefix_is_pointed_out(prefix: Path) -> None:
    with pytest.raises(DataError, match=f"without the suffix: {prefix}$"):
        check_indexed_dataset(f"{prefix}.bin")


def test_a_weight_taken_for_a_prefix_is_pointed_out() -> None:
    with pytest.raises(DataError, match="looks like a weight"):
        check_indexed_dataset("0.3")


@pytest.mark.parametrize("prefix", ["/nonexistent/folder/data", "a\0b", "x" * 5000])
def test_an_impossible_prefix_is_a_data_error(prefix: str) -> None:
    with pytest.raises(DataError):
        check_indexed_dataset(prefix)


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, b"PK\x03\x04", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "format version 2, expected 1"),
        (17, b"\x00", "token type code 0"),
        (17, b"\x09", "token type code 9"),
        (17, b"\x07", "token type float32"),
        (18, struct.pack("<Q", 0), "no documents"),
        (18, struct.pack("<Q", 2**63), "cut off"),
        (18, struct.pack("<Q", 3), "damaged: 122 bytes"),
        (26, struct.pack("<Q", 1), "no documents"),
        (26, struct.pack("<Q", 2**64 - 1), "cut off"),
        (HEADER.size, struct.pack("<i", -1), "negative"),
        (HEADER.size, struct.pack("<i", 11), "too short: 20 bytes, its index points to byte 22"),
        (HEADER.size + 16, struct.pack("<q", -2), "negative"),
        (HEADER.size + 16, struct.pack("<q", 2**63 - 1), "too short"),
        (BOUNDS_AT, struct.pack("<q", 1), "do not rise from 0"),
        (BOUNDS_AT + 8, struct.pack("<q", 3), "do not rise from 0"),
        (BOUNDS_AT + 32, struct.pack("<q", 5), "documents end at sequence 5, its sequences at 4"),
    ],
)
def test_each_damage_is_named(prefix: Path, at: int, data: bytes, message: str) -> None:
    damage(Path(f"{prefix}.idx"), at, data)
    with pytest.raises(DataError, match=message) as caught:
        check_indexed_dataset(prefix)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_every_truncation_is_found(prefix: Path, suffix: str) -> None:
    path = Path(f"{prefix}{suffix}")
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=r"cut off|too short"):
            check_indexed_dataset(prefix)


def test_a_dataset_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no tokens"):
        check_indexed_dataset(write_dataset(tmp_path / "d", [[], []]))
    with pytest.raises(DataError, match="holds no documents"):
        check_indexed_dataset(write_dataset(tmp_path / "e", []))


@given(st.lists(st.tuples(st.integers(0, 121), st.binary(min_size=1, max_size=9)), max_size=4), st.integers(0, 140))
@settings(deadline=None, max_examples=100)
def test_flipped_bytes_give_a_data_error_or_a_dataset_that_megatron_core_can_read(
    changes: list[tuple[int, bytes]], length: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_dataset(Path(folder, "d"))
        idx = Path(f"{prefix}.idx")
        for at, data in changes:
            damage(idx, at, data)
        idx.write_bytes(idx.read_bytes()[:length])
        try:
            summary = check_indexed_dataset(prefix)
        except DataError:
            return
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(str(prefix))
        assert sum(len(dataset[number]) for number in range(len(dataset))) == summary.tokens
        assert dataset.index.dtype.__name__ == summary.dtype


# Blends


def test_prefixes_have_no_weight() -> None:
    assert parse_blend(["a"]) == [(None, "a")]
    assert parse_blend(["a", "b", " c "]) == [(None, "a"), (None, "b"), (None, "c")]
    assert parse_blend(["a", "b"]) == [(None, "a"), (None, "b")]


def test_pairs_have_a_weight() -> None:
    assert parse_blend(["0.3", "a", "7e1", "b"]) == [(0.3, "a"), (70.0, "b")]


@pytest.mark.parametrize(
    "tokens",
    [[], [""], ["a", " "], ["1", "a", "b", "c"], ["a", "b", "1", "c"], ["0", "a"], ["-1", "a"], ["nan", "a"]],
)
def test_a_wrong_blend_is_refused(tokens: list[str]) -> None:
    with pytest.raises(DataError, match="--data-path"):
        parse_blend(tokens)


@given(st.lists(st.sampled_from(["1", "0.5", "a", "b/c", "30", " d "]), min_size=1, max_size=6))
@settings(deadline=None)
def test_a_blend_is_read_as_megatron_core_reads_it(tokens: list[str]) -> None:
    from megatron.core.datasets.utils import get_blend_from_list

    numbers = [token in ("1", "0.5", "30") for token in tokens[::2]]
    if len(tokens) % 2 == 0 and any(numbers) and not all(numbers):
        # megatron-core's own assertion lets some of these through and looks for a dataset named "1" later.
        with pytest.raises(DataError, match="give a weight for every prefix"):
            parse_blend(tokens)
        return
    prefixes, weights = get_blend_from_list(tokens)
    assert parse_blend(tokens) == list(zip(weights or [None] * len(prefixes), prefixes, strict=True))


# Splits


def test_a_split_is_divided_by_its_sum() -> None:
    assert parse_split("969,30,1") == (0.969, 0.03, 0.001)
    assert parse_split("1") == (1.0, 0.0, 0.0)
    assert parse_split("90, 10") == (0.9, 0.1, 0.0)


@pytest.mark.parametrize("split", ["", "0", "0,0,0", "1,2,3,4", "1.2.3", ".", "-1,2", "1e3,1", "abc", "9" * 400])
def test_a_wrong_split_is_refused(split: str) -> None:
    with pytest.raises(DataError, match="--split"):
        parse_split(split)


@given(st.lists(st.floats(0, 1000).map(lambda value: round(value, 3)), min_size=1, max_size=3))
@example([969.0, 30.0, 1.0])
@settings(deadline=None)
def test_a_split_has_the_bits_that_megatron_core_computes(numbers: list[float]) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

    assume(sum(numbers) > 0)
    split = ",".join(f"{number:.3f}" for number in numbers)
    shares = parse_split(split)
    assert list(shares) == parse_and_normalize_split(split)
    assert math.isclose(sum(shares), 1.0)


@given(
    shares=st.tuples(*[st.integers(0, 1000)] * 3).filter(any),
    sequences=st.lists(st.integers(1, 5000), min_size=1, max_size=4),
)
@example(shares=(4, 1, 1), sequences=[2])  # without the last part, the middle one's share is smaller than a document
@settings(max_examples=1000, deadline=None)
def test_a_fitted_split_has_no_empty_part(shares: tuple[int, int, int], sequences: list[int]) -> None:
    split = ",".join(map(str, shares))
    try:
        fitted, dropped = fit_split(split, sequences)
    except DataError:
        assert min(split_counts(parse_split(split), number)[0] for number in sequences) < 1
        return
    kept = parse_split(fitted)
    for number in sequences:
        counts = split_counts(kept, number)
        assert sum(counts) == number
        assert all((count > 0) == (share > 0) for count, share in zip(counts, kept, strict=True))
    assert bool(dropped) == (fitted != split)


def test_the_cut_is_megatron_cores() -> None:
    # As it cuts 1000 and 40 documents by the usual split: the ends of the parts are rounded, to even at a half.
    assert split_counts(parse_split("969,30,1"), 1000) == (969, 30, 1)
    assert split_counts(parse_split("969,30,1"), 40) == (39, 1, 0)
    assert fit_split("969,30,1", [40, 1000]) != ("969,30,1", ())
    assert fit_split("969,30,1", [1000]) == ("969,30,1", ())
