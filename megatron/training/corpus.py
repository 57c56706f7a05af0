"""Finds and reads the text that is turned into training data: files, folders, JSON lines, Python's own library.

A corpus is a fixed sequence of documents. It depends on the inputs alone, never on locale, time or the order in which
a folder happens to list its files, so that preparing the same text twice gives the same bytes. Documents are read
again for each pass and never all held at once. Called by `scripts/prepare_data.py`; imports no torch.
"""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

STDLIB = "stdlib"
"""As an input, stands for the sources of the running Python's standard library; a folder of that name is ./stdlib."""

_NOT_SOURCES = frozenset({"__pycache__"})
_NOT_LIBRARY = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class CorpusError(ValueError):
    """An input is missing, cannot be read or holds no text. One line: found, expected, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text, never empty."""

    text: str
    replaced: int
    """Characters that stand for bytes that were not UTF-8 (or for half a surrogate pair in JSON)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSummary:
    """What a pass over the whole corpus found."""

    documents: int
    characters: int
    replaced: int
    """As in Document, over all of them."""
    sha256: str
    """Of every text in order, with its length; two corpora with one digest give the same data."""


class Corpus:
    """The documents of some inputs. `files` is fixed when it is built; their contents are read on every pass."""

    def __init__(self, files: Sequence[Path], json_key: str) -> None:
        self.files = tuple(files)
        self._json_key = json_key

    def documents(self) -> Iterator[Document]:
        """Every document in order: one for each file, one for each line of a .jsonl file; empty ones are left out.

        Raises CorpusError for a file that cannot be read and for a line that is not an object with the key.
        """
        for path in self.files:
            documents = self._json_lines(path) if path.suffix == ".jsonl" else self._whole_file(path)
            yield from (document for document in documents if document.text)

    def summary(self) -> CorpusSummary:
        """Reads everything once; raises CorpusError as `documents` does, and if there is no document."""
        documents = characters = replaced = 0
        digest = hashlib.sha256()
        for document in self.documents():
            data = document.text.encode("utf-8")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
            documents += 1
            characters += len(document.text)
            replaced += document.replaced
        if documents == 0:
            raise CorpusError(f"no text in the input: {len(self.files)} files, all of them empty")
        return CorpusSummary(documents=documents, characters=characters, replaced=replaced, sha256=digest.hexdigest())

    def _whole_file(self, path: Path) -> Iterator[Document]:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CorpusError(f"cannot read {path}: {error.strerror or error}") from error
        yield _decode(data)

    def _json_lines(self, path: Path) -> Iterator[Document]:
        try:
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield self._json_line(line, f"{path}, line {number}")
        except OSError as error:
            raise CorpusError(f"cannot read {path}: {error.strerror or error}") from error

    def _json_line(self, line: bytes, where: str) -> Document:
        decoded = _decode(line)
        try:
            value = json.loads(decoded.text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise CorpusError(f"{where} is not JSON: {error}") from error
        text = value.get(self._json_key) if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise CorpusError(f"{where}: expected an object with text under {self._json_key!r}; see --json-key")
        text, halves = _LONE_SURROGATE.subn(_REPLACEMENT, text)
        return Document(text=text, replaced=decoded.replaced + halves)


def find_corpus(inputs: Sequence[str], *, suffixes: Sequence[str], json_key: str) -> Corpus:
    """The corpus of `inputs`, in the order given: files, folders, or the word `stdlib`.

    A folder stands for the files under it that end in one of `suffixes`, sorted by path byte by byte, without hidden
    ones. Raises CorpusError if an input does not exist or a folder has no such file.
    """
    endings = tuple("." + suffix.lstrip(".") for suffix in suffixes)
    files: list[Path] = []
    for given in inputs:
        path = Path(given)
        if given == STDLIB:
            files += _files_under(Path(sysconfig.get_paths()["stdlib"]), (".py",), _NOT_LIBRARY)
        elif path.is_dir():
            files += _files_under(path, endings, _NOT_SOURCES)
        elif path.exists():
            files.append(path)
        else:
            raise CorpusError(f"no such input: {given}; give a file, a folder or the word {STDLIB}")
    return Corpus(files, json_key)


def _files_under(folder: Path, endings: tuple[str, ...], skipped: frozenset[str]) -> list[Path]:
    found: list[Path] = []
    for where, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        visible = (Path(where, name) for name in names if name.endswith(endings) and not name.startswith("."))
        found += [path for path in visible if path.is_file()]
    if not found:
        raise CorpusError(f"no file under {folder} ends in {' or '.join(endings)}; see --suffix")
    return sorted(found, key=lambda path: os.fsencode(path.relative_to(folder).as_posix()))


def _refuse(error: OSError) -> None:
    raise CorpusError(f"cannot list {error.filename}: {error.strerror or error}") from error


def _decode(data: bytes) -> Document:
    try:
        return Document(text=data.decode("utf-8"), replaced=0)
    except UnicodeDecodeError:
        text = data.decode("utf-8", errors="replace")
        genuine = data.count(_REPLACEMENT.encode("utf-8"))
        return Document(text=text, replaced=text.count(_REPLACEMENT) - genuine)
