"""Writes Megatron's indexed datasets with numpy alone; the layout is described in `data_files.py`.

megatron-core's own IndexedDatasetBuilder writes the same bytes (a test compares them) but needs torch, whose import
takes longer than preparing a small text. Called by `scripts/prepare_data.py`. The caller chooses the paths: it writes
under temporary names and renames, so nothing here is atomic.
"""

from collections.abc import Sequence
from io import BufferedWriter
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from megatron.training.data_files import DTYPE_CODES, HEADER, MAGIC, VERSION, DataError

_UINT16_VOCABULARY_MAX = 65500
"""megatron-core's limit for two bytes a token, with some room left below 2**16."""


def token_dtype(vocab_size: int) -> str:
    """Name, as numpy has it, of the smallest token type Megatron uses for so many ids: `uint16` or `int32`."""
    return "uint16" if vocab_size < _UINT16_VOCABULARY_MAX else "int32"


class IndexedWriter:
    """Writes one dataset, document by document; used as a context manager.

    Tokens go to `bin_path` at once. The index is kept in memory (20 bytes a document) and written to `idx_path`
    when the block ends without an exception; with one, there is no index and the .bin file is left as it is.
    """

    def __init__(self, bin_path: Path, idx_path: Path, dtype: str) -> None:
        if dtype not in DTYPE_CODES:
            raise DataError(f"token type {dtype!r}: expected one of {', '.join(DTYPE_CODES)}")
        self._bin_path = bin_path
        self._idx_path = idx_path
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = DTYPE_CODES[dtype]
        self._stream: BufferedWriter | None = None
        self._sequence_lengths: list[int] = []
        self._document_bounds: list[int] = [0]

    def __enter__(self) -> "IndexedWriter":
        self._stream = self._bin_path.open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if kind is None:
            self._write_index()

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self._document_bounds) - 1

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return sum(self._sequence_lengths)

    def add_document(self, *sequences: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Appends one document made of `sequences`, each of shape [tokens]; usually there is one.

        Raises DataError if a token id does not fit the token type; nothing of the document is written then.
        """
        assert self._stream is not None, "add_document outside the with block"
        encoded = [self._encode(sequence) for sequence in sequences]
        for tokens in encoded:
            self._stream.write(tokens.tobytes())
            self._sequence_lengths.append(tokens.size)
        self._document_bounds.append(len(self._sequence_lengths))

    def _encode(self, sequence: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        ids = np.asarray(sequence, dtype=np.int64)
        assert ids.ndim == 1, f"a sequence has one dimension, not {ids.ndim}"
        limits = np.iinfo(self._dtype)
        if ids.size and (ids.min() < limits.min or ids.max() > limits.max):
            found = f"token ids {ids.min()} to {ids.max()}"
            raise DataError(f"document {self.documents}: {found} do not fit {self._dtype.name}")
        return ids.astype(self._dtype)

    def _write_index(self) -> None:
        lengths = np.asarray(self._sequence_lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), ends])[: lengths.size]
        bounds = np.asarray(self._document_bounds, dtype="<i8")
        with self._idx_path.open("wb") as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, self._code, lengths.size, bounds.size))
            stream.write(lengths.tobytes())
            stream.write(offsets.astype("<i8").tobytes())
            stream.write(bounds.tobytes())
