"""Tokenizers for Megatron's `--tokenizer-type`: text to token ids, the end-of-document id and the vocabulary's size.

`build_tokenizer` is called by the training script, whose GPTDatasetConfig takes the result as it is (megatron-core
asks for `vocab_size`, `eod` and `unique_identifiers` only), by the preflight and by `scripts/prepare_data.py`. The
objects resemble megatron-core's by shape and not by base class, so that this file imports neither torch nor
megatron-core. Nothing is ever downloaded: every file is local.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.training.config import DataSettings

TOKENIZER_TYPES = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer")
END_OF_DOCUMENT = "<|endoftext|>"

_USUAL_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
"""Looked for in this order in a tokenizer.json that has no file beside it naming its end token."""


class TokenizerError(ValueError):
    """The tokenizer's settings, or the files they name, cannot be used. One line: found, expected, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """Which tokenizer to build; each field is the flag of the same name."""

    tokenizer_type: str
    """One of TOKENIZER_TYPES."""
    vocab_file: str | None = None
    """GPT2BPETokenizer: JSON object from token to id."""
    merge_file: str | None = None
    """GPT2BPETokenizer: one merge a line, most frequent first."""
    tokenizer_model: str | None = None
    """HuggingFaceTokenizer: a local tokenizer.json, or a folder that holds one."""
    vocab_size: int | None = None
    """NullTokenizer: number of ids, not counting the end of a document. The other types take it from their files."""


class Tokenizer(Protocol):
    """What the trainer, megatron-core's datasets and the data preparation use of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Every id is below this; the end of a document is counted."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """Goes into the name of megatron-core's cached sample indices; the same wherever the files lie."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`, without an end of document."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, in order, on several threads where the kind of tokenizer can."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""


def tokenizer_for(data: DataSettings) -> Tokenizer:
    """The tokenizer that a run's settings name. Raises TokenizerError."""
    return build_tokenizer(
        TokenizerSettings(
            tokenizer_type=data.tokenizer_type or "",
            vocab_file=data.vocab_file,
            merge_file=data.merge_file,
            tokenizer_model=data.tokenizer_model,
            vocab_size=data.vocab_size,
        )
    )


def build_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """Builds the tokenizer of `settings`; raises TokenizerError with one line if it cannot."""
    match settings.tokenizer_type:
        case "GPT2BPETokenizer":
            vocab_file = _required(settings.vocab_file, "--vocab-file", settings)
            return _gpt2_bpe(vocab_file, _required(settings.merge_file, "--merge-file", settings))
        case "HuggingFaceTokenizer":
            return _hugging_face(_required(settings.tokenizer_model, "--tokenizer-model", settings))
        case "NullTokenizer":
            if settings.vocab_size is None or settings.vocab_size < 1:
                raise TokenizerError(f"NullTokenizer: --vocab-size is {settings.vocab_size}, expected 1 or more")
            return NullTokenizer(settings.vocab_size)
    known = ", ".join(TOKENIZER_TYPES)
    raise TokenizerError(f"--tokenizer-type {settings.tokenizer_type!r} is not known; expected one of {known}")


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tp: int) -> int:
    """Rows of the embedding: `vocab_size` rounded up to a multiple of `make_vocab_size_divisible_by * tp`.

    Raises TokenizerError if any of them is below 1.
    """
    if min(vocab_size, make_vocab_size_divisible_by, tp) < 1:
        found = f"{vocab_size} ids, divisible by {make_vocab_size_divisible_by}, tensor parallel size {tp}"
        raise TokenizerError(f"cannot pad the vocabulary: {found}; each must be 1 or more")
    multiple = make_vocab_size_divisible_by * tp
    return -(-vocab_size // multiple) * multiple


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library (GPT2BPETokenizer and HuggingFaceTokenizer). Can be pickled."""

    def __init__(self, *, kind: str, backend: tokenizers.Tokenizer, end_token: str, digest: str) -> None:
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._kind = kind
        self._backend = backend
        self._eod = vocabulary[end_token]
        self._vocab_size = max(vocabulary.values()) + 1
        self._digest = digest

    @property
    def vocab_size(self) -> int:
        """One above the largest id: where a file leaves ids out, the embedding still has a row for each."""
        return self._vocab_size

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        return self._eod

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """Kind and digest of the files' contents; their paths may differ between machines."""
        return OrderedDict({"class": self._kind, "sha256": self._digest})

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`; no end, start or padding is added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, on as many threads as RAYON_NUM_THREADS says."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        return self._backend.decode(list(ids), skip_special_tokens=False)


class NullTokenizer:
    """Text that already is token ids, written as numbers with blanks between them; `vocab_size` is the end's id."""

    def __init__(self, vocab_size: int) -> None:
        self._eod = vocab_size

    @property
    def vocab_size(self) -> int:
        """The ids 0 to `eod`, so one more than `--vocab-size` says."""
        return self._eod + 1

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        return self._eod

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """Kind and size."""
        return OrderedDict({"class": "NullTokenizer", "vocab_size": self.vocab_size})

    def tokenize(self, text: str) -> list[int]:
        """The numbers of `text`; raises TokenizerError for anything else and for ids outside the vocabulary."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise TokenizerError(f"NullTokenizer reads token ids written as numbers: {error}") from error
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            raise TokenizerError(f"NullTokenizer: ids {min(ids)} to {max(ids)}, expected 0 to {self._eod}")
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The numbers, with a blank between them."""
        return " ".join(map(str, ids))


def _required(value: str | None, flag: str, settings: TokenizerSettings) -> str:
    if not value:
        raise TokenizerError(f"{settings.tokenizer_type} needs {flag}")
    return value


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise TokenizerError(f"{flag} {path}: {error.strerror or error}; give a local file") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{flag} {path} is not UTF-8 text: {error}") from error


def _digest(*texts: str) -> str:
    """sha256 of the texts and where one ends and the next begins."""
    return hashlib.sha256(json.dumps(texts).encode("utf-8")).hexdigest()


def _gpt2_bpe(vocab_file: str, merge_file: str) -> SubwordTokenizer:
    vocab_text, merge_text = _read(Path(vocab_file), "--vocab-file"), _read(Path(merge_file), "--merge-file")
    vocabulary = _parse_vocabulary(vocab_text, vocab_file)
    if END_OF_DOCUMENT not in vocabulary:
        raise TokenizerError(f"--vocab-file {vocab_file} has no {END_OF_DOCUMENT}, which ends a document")
    unwritable = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys())
    if unwritable:  # the library would leave such bytes out without a word
        found = f"has no token for {len(unwritable)} of the 256 bytes, the first being {unwritable[0]!r}"
        raise TokenizerError(f"--vocab-file {vocab_file} {found}; it is not a byte-level vocabulary")
    merges = _parse_merges(merge_text, merge_file)
    absent = next((token for a, b in merges for token in (a, b, a + b) if token not in vocabulary), None)
    if absent is not None:
        found = f"--merge-file {merge_file} merges to or from {absent!r}, which --vocab-file {vocab_file} lacks"
        raise TokenizerError(f"{found}; give the two files of one tokenizer")
    # The end token is in the vocabulary but not declared special: that text inside a document stays plain text, as
    # in GPT-2's own encoder, and cannot end the document early.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    digest = _digest(vocab_text, merge_text)
    return SubwordTokenizer(kind="GPT2BPETokenizer", backend=backend, end_token=END_OF_DOCUMENT, digest=digest)


def _parse_vocabulary(text: str, vocab_file: str) -> dict[str, int]:
    try:
        vocabulary = json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenizerError(f"--vocab-file {vocab_file} is not JSON: {error}") from error
    if not (isinstance(vocabulary, dict) and all(type(i) is int and 0 <= i < 2**31 for i in vocabulary.values())):
        raise TokenizerError(f"--vocab-file {vocab_file}: expected one JSON object from token to id")
    if len(set(vocabulary.values())) != len(vocabulary):
        raise TokenizerError(f"--vocab-file {vocab_file} gives one id to two tokens")
    return vocabulary


def _parse_merges(text: str, merge_file: str) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line or line.startswith("#version"):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise TokenizerError(f"--merge-file {merge_file}, line {number}: expected two tokens and a blank between")
        merges.append((parts[0], parts[1]))
    return merges


def _hugging_face(tokenizer_model: str) -> SubwordTokenizer:
    path = Path(tokenizer_model)
    if path.is_dir():
        path = path / "tokenizer.json"
    text = _read(path, "--tokenizer-model")
    try:  # from_buffer, because from_str raises a bare Exception for a damaged file
        backend = tokenizers.Tokenizer.from_buffer(text.encode("utf-8"))
    except ValueError as error:
        raise TokenizerError(f"--tokenizer-model {path} is not a whole tokenizer.json: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    end_token = _end_token(path, backend)
    digest = _digest(text, end_token)
    return SubwordTokenizer(kind="HuggingFaceTokenizer", backend=backend, end_token=end_token, digest=digest)


def _end_token(path: Path, backend: tokenizers.Tokenizer) -> str:
    """The `eos_token` named in a file beside tokenizer.json, else the first of the usual ones that it knows."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        beside = path.with_name(name)
        if not beside.is_file():
            continue
        try:
            declared = json.loads(_read(beside, "--tokenizer-model"))
        except json.JSONDecodeError as error:
            raise TokenizerError(f"--tokenizer-model {beside} is not JSON: {error}") from error
        token = declared.get("eos_token") if isinstance(declared, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str):
            continue
        if backend.token_to_id(token) is None:
            raise TokenizerError(f"{beside} says that {token!r} ends a document, but {path} has no such token")
        return token
    found = next((token for token in _USUAL_ENDS if backend.token_to_id(token) is not None), None)
    if found is None:
        raise TokenizerError(f"{path} does not say what ends a document; name an eos_token in tokenizer_config.json")
    return found
