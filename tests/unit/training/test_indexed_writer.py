"""Claims about the writer of indexed datasets; megatron-core's own reader and writer are the reference."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.training.data_files import DataError, check_indexed_dataset
from megatron.training.indexed_writer import IndexedWriter, token_dtype

SEQUENCE = st.lists(st.integers(0, 2**16 - 1), max_size=20)
DOCUMENTS = st.lists(st.lists(SEQUENCE, min_size=1, max_size=3), max_size=8)


def write(prefix: Path, documents: list[list[list[int]]], dtype: str) -> None:
    with IndexedWriter(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), dtype) as writer:
        for sequences in documents:
            writer.add_document(*sequences)
    assert writer.documents == len(documents)
    assert writer.tokens == sum(len(sequence) for sequences in documents for sequence in sequences)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
@given(documents=DOCUMENTS)
@example(documents=[])
@example(documents=[[[]], [[1], [], [2, 3]]])
@settings(deadline=None, max_examples=60)
def test_the_files_are_those_of_megatron_core(dtype: str, documents: list[list[list[int]]]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        write(ours, documents, dtype)
        builder = IndexedDatasetBuilder(f"{theirs}.bin", dtype=getattr(np, dtype))
        for sequences in documents:
            tokens = [token for sequence in sequences for token in sequence]
            builder.add_document(np.array(tokens), [len(sequence) for sequence in sequences])
        builder.finalize(f"{theirs}.idx")
        for suffix in (".bin", ".idx"):
            assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()


@given(documents=DOCUMENTS.filter(lambda documents: any(map(any, documents))))
@settings(deadline=None, max_examples=60)
def test_megatron_core_reads_back_what_was_written(documents: list[list[list[int]]]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "d")
        write(prefix, documents, "uint16")
        dataset = IndexedDataset(str(prefix))
        written = [sequence for sequences in documents for sequence in sequences]
        assert [dataset[number].tolist() for number in range(len(dataset))] == written
        assert dataset.document_indices.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
        summary = check_indexed_dataset(prefix)
        assert (summary.documents, summary.sequences) == (len(documents), len(written))
        assert summary.tokens == sum(map(len, written))


@pytest.mark.parametrize("vocab_size", [1, 4096, 65499, 65500, 65536, 128_000])
def test_the_token_type_is_the_one_megatron_core_chooses(vocab_size: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType

    assert token_dtype(vocab_size) == DType.optimal_dtype(vocab_size).__name__


@pytest.mark.parametrize("token", [-1, 2**16])
def test_a_token_that_does_not_fit_is_refused_and_nothing_of_its_document_is_written(
    tmp_path: Path, token: int
) -> None:
    with IndexedWriter(tmp_path / "d.bin", tmp_path / "d.idx", "uint16") as writer:
        writer.add_document([1])
        with pytest.raises(DataError, match=f"document 1: token ids .*{token} .*do not fit uint16|{token} to 5"):
            writer.add_document([2], [5, token])
        writer.add_document([3])
    assert check_indexed_dataset(tmp_path / "d").tokens == 2
    assert (tmp_path / "d.bin").read_bytes() == b"\1\0\3\0"


def test_an_exception_leaves_no_index(tmp_path: Path) -> None:
    def interrupted() -> None:
        with IndexedWriter(tmp_path / "d.bin", tmp_path / "d.idx", "uint16") as writer:
            writer.add_document([1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "d.bin").exists()
    assert not (tmp_path / "d.idx").exists()


def test_an_unknown_token_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token type 'uint32'"):
        IndexedWriter(tmp_path / "d.bin", tmp_path / "d.idx", "uint32")
