"""Turns text into a Megatron indexed dataset: `<prefix>_text_document.bin` and `.idx`.

Run by hand, by the demo and by tests. Without a tokenizer it trains one on the same text (byte-level BPE) and writes
`<prefix>-vocab.json` and `<prefix>-merges.txt`. `<prefix>-prepared.json` records what went in and what came out; a
second run with the same text and settings does nothing. All files are written in a hidden folder next to their
destination and renamed at the end, the index last but for the record, so a run that is killed leaves either the
dataset that was there, the new one, or none that can be loaded, and the next run tidies up.

Equal text, settings and version of the `tokenizers` library give equal bytes, whatever the locale and the number of
workers. It imports no torch and starts at once.
"""

import argparse
import fcntl
import hashlib
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from megatron.training.corpus import Corpus, CorpusError, CorpusSummary, find_corpus
from megatron.training.data_files import DataError
from megatron.training.indexed_writer import IndexedWriter, token_dtype
from megatron.training.tokenizer import (
    END_OF_DOCUMENT,
    TOKENIZER_TYPES,
    Tokenizer,
    TokenizerError,
    TokenizerSettings,
    build_tokenizer,
)

RECORD_VERSION = 1
RESULT_KEYS = frozenset({"documents", "tokens", "dtype", "vocab_size", "replaced"})
TRAINED_VOCABULARY_MIN = 257
"""One token for each byte, and the end of a document."""
BATCH_CHARACTERS = 4_000_000
"""Text handed to the tokenizer together; bounds memory."""


class PrepareError(ValueError):
    """Preparing cannot go on for a reason the user can remove. One line: found, expected, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where everything goes. All files share the folder and start with the name of the prefix."""

    prefix: str

    @property
    def folder(self) -> Path:
        """Folder of the prefix; made if it is not there."""
        return Path(self.prefix).parent

    @property
    def name(self) -> str:
        """Last part of the prefix."""
        return Path(self.prefix).name

    @property
    def dataset(self) -> str:
        """What `--data-path` takes."""
        return f"{self.prefix}_text_document"

    @property
    def record_name(self) -> str:
        """File name of the record of inputs and outputs."""
        return f"{self.name}-prepared.json"

    @property
    def vocab_name(self) -> str:
        """File name of a trained vocabulary; it is the one that the `tokenizers` library chooses."""
        return f"{self.name}-vocab.json"

    @property
    def merges_name(self) -> str:
        """File name of the merges of a trained vocabulary, chosen likewise."""
        return f"{self.name}-merges.txt"

    def names(self, *, trained: bool) -> list[str]:
        """File names to publish, in order: nothing can be loaded before the index is there, and it comes late."""
        vocabulary = [self.vocab_name, self.merges_name] if trained else []
        return [*vocabulary, f"{self.name}_text_document.bin", f"{self.name}_text_document.idx"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script; returns 0, or 2 after one line on stderr that says what to do."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may hold what the locale cannot show
    options = _parser().parse_args(arguments)
    # Read by the tokenizers library when it first needs its threads, which is later than this.
    os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if options.workers > 1 else "false"
    try:
        prepare(options)
    except (CorpusError, DataError, PrepareError, TokenizerError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or options.output_prefix}: {error.strerror or error}")
    return 0


def prepare(options: argparse.Namespace) -> None:
    """Does what the parsed `options` say and prints a summary; raises the errors that `main` turns into one line."""
    outputs = Outputs(prefix=options.output_prefix)
    if not outputs.name or options.output_prefix.endswith("/"):
        raise PrepareError(f"--output-prefix {options.output_prefix!r} names a folder; add the start of a file name")
    given = _given_tokenizer(options)
    corpus = find_corpus(options.input, suffixes=options.suffix, json_key=options.json_key)
    text = corpus.summary()
    wanted = _wanted(options, given, text)
    record = None if options.force else _whole_record(outputs, wanted)
    if record is not None:
        _report(outputs, options, record, "already prepared, nothing to do (--force does it again)")
        return
    size = f"{text.documents:,} documents, {text.characters / 1e6:.1f} million characters"
    print(f"{size}: " + ("encoding" if given else "training a vocabulary, then encoding"), flush=True)
    outputs.folder.mkdir(parents=True, exist_ok=True)
    with _work_folder(outputs) as work:
        tokenizer = given or _train(corpus, options.vocab_size, outputs, work)
        result = _encode(corpus, tokenizer, options.append_eod, outputs, work)
        names = outputs.names(trained=given is None)
        files = {name: _file_digest(work / name) for name in names}
        record = {**wanted, "result": {**result, "replaced": text.replaced}, "files": files}
        (work / outputs.record_name).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        _publish(work, outputs, names)
    _report(outputs, options, record, "prepared")


def _given_tokenizer(options: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer that the flags name, or None if one is to be trained."""
    if options.tokenizer_type is None:
        flags = {"--vocab-file": options.vocab_file, "--merge-file": options.merge_file}
        lonely = [flag for flag, value in {**flags, "--tokenizer-model": options.tokenizer_model}.items() if value]
        if lonely:
            raise PrepareError(f"{lonely[0]} needs --tokenizer-type, one of {', '.join(TOKENIZER_TYPES)}")
        if options.vocab_size < TRAINED_VOCABULARY_MIN:
            raise PrepareError(f"--vocab-size is {options.vocab_size}, expected {TRAINED_VOCABULARY_MIN} or more")
        return None
    settings = TokenizerSettings(
        tokenizer_type=options.tokenizer_type,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        tokenizer_model=options.tokenizer_model,
        vocab_size=options.vocab_size,
    )
    return build_tokenizer(settings)


def _wanted(options: argparse.Namespace, given: Tokenizer | None, text: CorpusSummary) -> dict[str, Any]:
    """All that the outputs depend on. Holds no path and no time, so equal data has an equal record anywhere."""
    trained = {"class": "trained here", "vocab_size": options.vocab_size}
    return {
        "version": RECORD_VERSION,
        "tokenizers": tokenizers.__version__,
        "tokenizer": dict(given.unique_identifiers) if given else trained,
        "append_eod": options.append_eod,
        "text": {"documents": text.documents, "characters": text.characters, "sha256": text.sha256},
    }


def _whole_record(outputs: Outputs, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The record of an earlier run, if that run wanted the same and everything it wrote is still as it was."""
    try:
        record = json.loads((outputs.folder / outputs.record_name).read_text(encoding="utf-8"))
        if not isinstance(record, dict) or {key: record.get(key) for key in wanted} != wanted:
            return None
        if not record["result"].keys() >= RESULT_KEYS:
            return None
        if all(_file_digest(outputs.folder / name) == digest for name, digest in record["files"].items()):
            return record
    except (OSError, ValueError, KeyError, AttributeError):  # absent or damaged: all is prepared again
        return None
    return None


@contextmanager
def _work_folder(outputs: Outputs) -> Iterator[Path]:
    """A hidden folder on the disk of the outputs, locked so that two runs for one prefix cannot mix."""
    work = outputs.folder / f".{outputs.name}.preparing"
    work.mkdir(exist_ok=True)
    handle = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PrepareError(f"another run is preparing {outputs.prefix}; wait for it to end") from error
        try:
            yield work  # what a killed run left here is overwritten or goes with the folder
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(handle)


def _train(corpus: Corpus, vocab_size: int, outputs: Outputs, work: Path) -> Tokenizer:
    """Trains byte-level BPE on the corpus, writes its two files into `work` and reads them back as training will."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((document.text for document in corpus.documents()), trainer)
    backend.model.save(str(work), outputs.name)
    settings = TokenizerSettings(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(work / outputs.vocab_name),
        merge_file=str(work / outputs.merges_name),
    )
    return build_tokenizer(settings)


def _encode(corpus: Corpus, tokenizer: Tokenizer, append_eod: bool, outputs: Outputs, work: Path) -> dict[str, Any]:
    """Writes .bin and .idx into `work`; returns what they hold. Documents without a token are left out."""
    end = [tokenizer.eod] if append_eod else []
    dtype = token_dtype(tokenizer.vocab_size)
    target = work / f"{outputs.name}_text_document"
    with IndexedWriter(target.with_name(f"{target.name}.bin"), target.with_name(f"{target.name}.idx"), dtype) as writer:
        for texts in _batches(corpus):
            for ids in tokenizer.tokenize_batch(texts):
                if ids:
                    writer.add_document(ids + end)
    if writer.documents == 0:
        raise PrepareError("no document of the input has a token; give text that is not empty")
    return {
        "documents": writer.documents,
        "tokens": writer.tokens,
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
    }


def _batches(corpus: Corpus) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in corpus.documents():
        batch.append(document.text)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _publish(work: Path, outputs: Outputs, names: list[str]) -> None:
    """Moves the files to their final names. The old index goes first, so old and new parts are never read together."""
    for name in (*names, outputs.record_name):
        _sync(work / name)
    for old in (outputs.record_name, names[-1]):
        (outputs.folder / old).unlink(missing_ok=True)
    for name in (*names, outputs.record_name):
        os.replace(work / name, outputs.folder / name)
    _sync(outputs.folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _report(outputs: Outputs, options: argparse.Namespace, record: dict[str, Any], headline: str) -> None:
    result = record["result"]
    if options.tokenizer_type is None:
        vocab, merges = outputs.folder / outputs.vocab_name, outputs.folder / outputs.merges_name
        flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(vocab), "--merge-file", str(merges)]
    else:
        flags = ["--tokenizer-type", options.tokenizer_type]
        for flag in ("vocab_file", "merge_file", "tokenizer_model"):
            value = getattr(options, flag)
            flags += [f"--{flag.replace('_', '-')}", value] if value else []
        flags += ["--vocab-size", str(options.vocab_size)] if options.tokenizer_type == "NullTokenizer" else []
    print(f"{outputs.prefix}: {headline}")
    print(f"  documents   {result['documents']:,}")
    print(f"  tokens      {result['tokens']:,} ({result['dtype']})")
    print(f"  vocabulary  {result['vocab_size']:,}")
    if result["replaced"]:
        print(f"  replaced    {result['replaced']:,} characters that were not UTF-8")
    print(f"  data        {outputs.dataset}.bin, .idx")
    print("train on it with")
    print(f"  {shlex.join(['--data-path', outputs.dataset, *flags])}")


def _fail(message: str) -> int:
    print("prepare_data: " + " ".join(message.split()), file=sys.stderr)
    return 2


class _OneLineParser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Prints `message` and exits with code 2."""
        sys.exit(_fail(f"{message}; see --help"))


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="prepare_data", description="Turns text into a Megatron indexed dataset.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, .jsonl files, folders, or the word stdlib")
    add("--output-prefix", required=True, help="writes <prefix>_text_document.bin and .idx, and more beside them")
    add("--suffix", nargs="+", default=[".py", ".txt"], help="endings of files to take from folders (.py .txt)")
    add("--json-key", default="text", help="where a line of a .jsonl file has its text (text)")
    add("--vocab-size", type=_positive, default=4096, help="of the tokenizer trained here, or of NullTokenizer (4096)")
    add("--tokenizer-type", choices=TOKENIZER_TYPES, help="use this kind and train none")
    add("--vocab-file", help="for GPT2BPETokenizer")
    add("--merge-file", help="for GPT2BPETokenizer")
    add("--tokenizer-model", help="for HuggingFaceTokenizer: a local tokenizer.json or its folder")
    add("--append-eod", action=argparse.BooleanOptionalAction, default=True, help="end every document with its token")
    add("--workers", type=_positive, default=len(os.sched_getaffinity(0)), help="threads (one for each CPU)")
    add("--force", action="store_true", help="do it again even if nothing changed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
