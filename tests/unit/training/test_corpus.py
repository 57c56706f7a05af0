"""Claims about finding and reading text."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.training.corpus import Corpus, CorpusError, find_corpus


def corpus_of(*inputs: Path | str, suffixes: tuple[str, ...] = (".py", ".txt"), json_key: str = "text") -> Corpus:
    return find_corpus([str(given) for given in inputs], suffixes=suffixes, json_key=json_key)


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus.documents()]


def test_a_folder_is_read_recursively_in_the_order_of_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.txt", "a/z.py", "a.txt", "B.txt", "ä.txt", "a/skip.md", ".hidden.txt", ".git/x.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name, encoding="utf-8")
    expected = ["B.txt", "a.txt", "a/z.py", "b.txt", "ä.txt"]
    assert texts(corpus_of(tmp_path)) == expected
    walk = os.walk

    def walk_backwards(top: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
        for where, folders, names in walk(top, onerror=onerror):
            folders.reverse()
            yield where, folders, names[::-1]

    monkeypatch.setattr(os, "walk", walk_backwards)
    assert texts(corpus_of(tmp_path)) == expected
    assert texts(corpus_of(tmp_path, suffixes=("md",))) == ["a/skip.md"]


def test_inputs_keep_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text("1")
    (tmp_path / "two.md").write_text("2")
    assert texts(corpus_of(tmp_path / "two.md", tmp_path / "one.md")) == ["2", "1"]


def test_the_standard_library_is_sources_without_tests() -> None:
    files = corpus_of("stdlib").files
    names = [path.name for path in files]
    assert {"argparse.py", "dataclasses.py"} <= set(names)
    assert len(files) > 300
    assert not any({"test", "tests", "site-packages", "__pycache__"} & set(path.parts) for path in files)
    assert all(path.suffix == ".py" for path in files)


def test_a_folder_named_stdlib_is_reached_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "stdlib" / "x.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert texts(corpus_of("./stdlib")) == ["mine"]


def test_each_json_line_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a\\nb", "body": "x"}\n\n{"text": "", "body": "y"}\n{"text": "\\u00e4", "body": "z"}')
    assert texts(corpus_of(path)) == ["a\nb", "ä"]
    assert texts(corpus_of(path, json_key="body")) == ["x", "y", "z"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"other": "x"}', '{"text": 3}', "[" * 100_000])
def test_a_wrong_json_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(CorpusError, match=r"d\.jsonl, line 2"):
        texts(corpus_of(path))


def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x\xff\xfey" + "�".encode())
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xff \\ud800 \\ud83d\\ude00"}')
    corpus = corpus_of(tmp_path, suffixes=(".txt", ".jsonl"))
    assert texts(corpus) == ["x��y�", "� � 😀"]
    assert corpus.summary().replaced == 4


def test_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert texts(corpus_of(tmp_path)) == ["a\r\nb\rc\n"]


def test_the_digest_tells_texts_and_their_borders_apart(tmp_path: Path) -> None:
    def digest(*parts: str) -> str:
        for number, part in enumerate(parts):
            (tmp_path / f"{number}.md").write_text(part)
        return corpus_of(*(tmp_path / f"{number}.md" for number in range(len(parts)))).summary().sha256

    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("c", "ab")}) == 4
    assert digest("ab", "c") == digest("ab", "c")


def test_what_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no such input: .*nowhere"):
        corpus_of(tmp_path / "nowhere")
    with pytest.raises(CorpusError, match=r"ends in \.py or \.txt"):
        corpus_of(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(CorpusError, match="all of them empty"):
        corpus_of(tmp_path).summary()


def test_a_file_that_vanishes_is_a_corpus_error(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text("x")
        corpus = corpus_of(tmp_path / name)
        (tmp_path / name).unlink()
        with pytest.raises(CorpusError, match=f"cannot read .*{name}: No such file"):
            corpus.summary()
