"""Checks on Megatron's indexed datasets, and the reading of `--data-path` and `--split`, before anything is started.

An indexed dataset is two files with one prefix. `<prefix>.bin` is all token ids, one after the other. `<prefix>.idx` is

    bytes 0-8    magic "MMIDIDX" and two zero bytes      bytes 18-25  n, the number of sequences (u64)
    bytes 9-16   version 1 (u64)                         bytes 26-33  m, the number of documents plus one (u64)
    byte  17     code of the token dtype                 then int32[n] tokens a sequence, int64[n] byte offset in .bin,
                                                         int64[m] first sequence of each document, the last being n

all little-endian, with int8[n] modes at the end if the dataset is multimodal. megatron-core reads it in
`datasets/indexed_dataset.py`, by assertions and, where the file is damaged, by crashing in the middle of a run.
Called by the preflight and by `scripts/prepare_data.py`; the layout's constants serve `indexed_writer.py`.
It imports no torch, so that a wrong path is reported in milliseconds.
"""

import difflib
import itertools
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of documents plus one."""

SPLIT_NAMES = ("training", "validation", "test")

_SEQUENCES_A_STEP = 1 << 20
"""Index entries looked at together; bounds the memory of a check, whatever the size of the dataset."""


class DataError(ValueError):
    """A dataset, blend or split given by the user cannot be used. One line: found, expected, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedDatasetSummary:
    """What a whole indexed dataset holds."""

    documents: int
    sequences: int
    """Equal to documents, unless documents were split into sentences."""
    tokens: int
    dtype: str
    """numpy's name of the token type in .bin, `uint16` or `int32` in practice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    dtype: str
    sequences: int
    document_bounds: int


def check_indexed_dataset(prefix: str | Path) -> IndexedDatasetSummary:
    """Reads the whole index of the dataset at `prefix` (a path without `.bin` and `.idx`), and no token.

    Raises DataError if a file is missing or unreadable, if the index is damaged, if it points outside the .bin file,
    or if there is nothing to train on. Never raises anything else for what the files hold.
    """
    idx_path, bin_path = _existing_files(str(prefix))
    try:
        bin_bytes = bin_path.stat().st_size
        idx_bytes = idx_path.stat().st_size
        with idx_path.open("rb") as stream:
            header = _read_header(stream.read(HEADER.size), idx_path)
        _check_idx_bytes(header, idx_bytes, idx_path)
        tokens = _check_sequences(header, idx_path, bin_bytes, bin_path)
        _check_documents(header, idx_path)
    except OSError as error:
        raise DataError(f"cannot read the dataset {prefix}: {error.strerror or error}") from error
    if tokens == 0:
        raise DataError(f"{bin_path} holds no tokens; prepare the data again from text that is not empty")
    documents = header.document_bounds - 1
    return IndexedDatasetSummary(documents=documents, sequences=header.sequences, tokens=tokens, dtype=header.dtype)


def parse_blend(tokens: Sequence[str]) -> list[tuple[float | None, str]]:
    """Reads the values of `--data-path`: prefixes only (weight None), or weight and prefix in turn.

    As in Megatron, an odd number of values is all prefixes, an even number is pairs if every first one is a number.
    Raises DataError if there is no value, if only some pairs start with a number, or if a weight is not above 0.
    """
    values = [token.strip() for token in tokens]
    if not values or "" in values:
        raise DataError("--data-path has an empty value; give a dataset prefix, or pairs of weight and prefix")
    if len(values) % 2 == 1:
        return [(None, prefix) for prefix in values]
    weights = [_number(value) for value in values[::2]]
    if all(weight is None for weight in weights):
        return [(None, prefix) for prefix in values]
    blend: list[tuple[float | None, str]] = []
    for text, weight, prefix in zip(values[::2], weights, values[1::2], strict=True):
        if weight is None:
            raise DataError(f"--data-path: found {text!r} where a weight is expected; give a weight for every prefix")
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(f"--data-path: the weight of {prefix} is {text}; it must be a number above 0")
        blend.append((weight, prefix))
    return blend


def parse_split(split: str) -> tuple[float, float, float]:
    """Reads `--split` into the shares of documents for training, validation and test, which add up to 1.

    As in Megatron: up to three numbers, the missing ones being 0, divided by their sum ("969,30,1", "90,10", "1").
    Raises DataError for more than three, for none above 0, and for signs and exponents, which Megatron would drop.
    """
    if not re.fullmatch(r"[0-9.,:;/\s]*", split):
        raise DataError(f"--split {split!r}: expected up to three plain numbers such as 969,30,1")
    try:
        numbers = [float(number) for number in re.findall(r"[.0-9]+", split)]
    except ValueError as error:
        raise DataError(f"--split {split!r}: {error}; expected up to three numbers such as 969,30,1") from error
    if len(numbers) > len(SPLIT_NAMES):
        raise DataError(f"--split {split!r} has {len(numbers)} numbers; expected one each for {', '.join(SPLIT_NAMES)}")
    total = sum(numbers)
    if not (math.isfinite(total) and total > 0):
        raise DataError(f"--split {split!r} adds up to {total:g}; at least one share must be above 0")
    padded = np.asarray((*numbers, 0.0, 0.0, 0.0)[: len(SPLIT_NAMES)], dtype=np.float64)
    train, valid, test = (padded / padded.sum()).tolist()  # megatron-core's own arithmetic, for the same bits
    return train, valid, test


def split_counts(shares: tuple[float, float, float], sequences: int) -> tuple[int, int, int]:
    """How many of a dataset's `sequences` (documents) training, validation and test get, as megatron-core cuts."""
    bounds = [round(share * sequences) for share in itertools.accumulate(shares, initial=0.0)]
    train, valid, test = (end - start for start, end in itertools.pairwise(bounds))
    return train, valid, test


def fit_split(split: str, sequences: Sequence[int]) -> tuple[str, tuple[str, ...]]:
    """(`split` without the parts that would be empty in one of the datasets, names of those parts).

    megatron-core searches an empty part for ever. Raises DataError when nothing is left to train on.
    """
    fitted, dropped = split, list[str]()
    while True:
        shares = list(parse_split(fitted))  # what is left shares the whole anew, so that another part may become empty
        counts = [split_counts((shares[0], shares[1], shares[2]), number) for number in sequences]
        empty = [i for i in range(3) if shares[i] > 0 and min(count[i] for count in counts) < 1]
        if 0 in empty or shares[0] == 0:
            raise DataError(
                f"--split {split} leaves a dataset of {min(sequences)} documents without one to train on; "
                "prepare more documents, or give training a greater share"
            )
        if not empty:
            break
        for i in empty:
            dropped.append(SPLIT_NAMES[i])
            shares[i] = 0.0
        fitted = ",".join(f"{share:.17f}" for share in shares)
    return fitted, tuple(dropped)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _existing_files(prefix: str) -> tuple[Path, Path]:
    """The paths of .idx and .bin; DataError with the likeliest reason if they are not both there."""
    idx_path, bin_path = Path(prefix + ".idx"), Path(prefix + ".bin")
    try:
        missing = [path for path in (idx_path, bin_path) if not path.is_file()]
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise DataError(f"cannot look for the dataset {prefix!r}: {error}") from error
    if not missing:
        return idx_path, bin_path
    if len(missing) == 1:
        there = bin_path if missing[0] == idx_path else idx_path
        raise DataError(f"found {there} but no {missing[0].name} next to it; prepare or copy the dataset again")
    raise DataError(f"no dataset at {prefix} (expected {idx_path.name} and {bin_path.name}); {_advice(prefix)}")


def _advice(prefix: str) -> str:
    path = Path(prefix)
    if path.suffix in (".bin", ".idx") and path.is_file():
        return f"give the prefix without the suffix: {path.with_suffix('')}"
    if _number(prefix) is not None:
        return "this looks like a weight: --data-path takes prefixes only, or a weight before every prefix"
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    try:
        names = sorted(found.stem for found in path.parent.glob("*.idx") if found.with_suffix(".bin").is_file())
    except OSError:
        names = []
    if not names:
        return f"the folder {path.parent} holds no dataset; make one with scripts/prepare_data.py"
    longer = [name for name in names if name.startswith(path.name)]
    nearest = (longer or difflib.get_close_matches(path.name, names, n=1, cutoff=0.0) or names)[0]
    return f"the nearest one there is {path.parent / nearest}"


def _read_header(data: bytes, idx_path: Path) -> _Header:
    if len(data) < HEADER.size:
        raise DataError(f"{idx_path} is cut off: {len(data)} bytes, its header alone has {HEADER.size}; {_AGAIN}")
    magic, version, code, sequences, document_bounds = HEADER.unpack(data)
    if magic != MAGIC:
        raise DataError(f"{idx_path} starts with {magic!r}, expected {MAGIC!r}; it is not a Megatron index, {_AGAIN}")
    if version != VERSION:
        raise DataError(f"{idx_path} has format version {version}, expected {VERSION}; {_AGAIN}")
    names = {code: name for name, code in DTYPE_CODES.items()}
    dtype = names.get(code)
    if dtype is None or dtype.startswith("float"):
        raise DataError(f"{idx_path}: token type {dtype or f'code {code}'}, expected an integer type; {_AGAIN}")
    if sequences == 0 or document_bounds < 2:
        raise DataError(f"{idx_path} holds no documents; prepare the data again from text that is not empty")
    return _Header(dtype=dtype, sequences=sequences, document_bounds=document_bounds)


def _check_idx_bytes(header: _Header, idx_bytes: int, idx_path: Path) -> None:
    expected = HEADER.size + 12 * header.sequences + 8 * header.document_bounds
    if idx_bytes < expected:
        raise DataError(f"{idx_path} is cut off: {idx_bytes} bytes, its header says {expected}; {_AGAIN}")
    if idx_bytes not in (expected, expected + header.sequences):  # the latter with a mode for each sequence
        raise DataError(f"{idx_path} is damaged: {idx_bytes} bytes, its header says {expected}; {_AGAIN}")


def _check_sequences(header: _Header, idx_path: Path, bin_bytes: int, bin_path: Path) -> int:
    """Every sequence must lie inside the .bin file. Returns the number of tokens of all of them."""
    itemsize = np.dtype(header.dtype).itemsize
    tokens = 0
    lengths = _index_column(idx_path, "<i4", HEADER.size, header.sequences)
    offsets = _index_column(idx_path, "<i8", HEADER.size + 4 * header.sequences, header.sequences)
    for lengths_part, offsets_part in zip(lengths, offsets, strict=True):
        if lengths_part.min() < 0 or offsets_part.min() < 0:
            raise DataError(f"{idx_path} is damaged: a sequence has a negative length or offset; {_AGAIN}")
        # The offset alone comes first: once it is known to be small, the sum below cannot overflow.
        end = int(offsets_part.max())
        if end <= bin_bytes:
            end = int((offsets_part + lengths_part.astype(np.int64) * itemsize).max())
        if end > bin_bytes:
            raise DataError(f"{bin_path} is too short: {bin_bytes} bytes, its index points to byte {end}; {_AGAIN}")
        tokens += int(lengths_part.sum(dtype=np.int64))
    return tokens


def _check_documents(header: _Header, idx_path: Path) -> None:
    """The bounds of documents must rise from 0 to the number of sequences."""
    previous = 0
    offset = HEADER.size + 12 * header.sequences
    for number, bounds in enumerate(_index_column(idx_path, "<i8", offset, header.document_bounds)):
        first_is_wrong = number == 0 and bounds[0] != 0
        if first_is_wrong or bounds[0] < previous or bool((bounds[1:] < bounds[:-1]).any()):
            raise DataError(f"{idx_path} is damaged: its document bounds do not rise from 0; {_AGAIN}")
        previous = int(bounds[-1])
    if previous != header.sequences:
        found = f"its documents end at sequence {previous}, its sequences at {header.sequences}"
        raise DataError(f"{idx_path} is damaged: {found}; {_AGAIN}")


def _index_column(path: Path, dtype: str, offset: int, count: int) -> Iterator[npt.NDArray[Any]]:
    """The `count` values of `dtype` at byte `offset`, a bounded part at a time."""
    column = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))
    for start in range(0, count, _SEQUENCES_A_STEP):
        yield np.asarray(column[start : start + _SEQUENCES_A_STEP])


_AGAIN = "prepare or copy the dataset again"
