"""Claims about the script that prepares data, most of them tried in this process, kills and clean starts in another."""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.training.data_files import DataError, check_indexed_dataset
from megatron.training.tokenizer import TokenizerSettings, build_tokenizer
from scripts import prepare_data

SCRIPT = Path(prepare_data.__file__)
PRODUCTS = ["lib-merges.txt", "lib-prepared.json", "lib-vocab.json", "lib_text_document.bin", "lib_text_document.idx"]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"document {number}: the cat sat on the mat, ähnlich. " * 20)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def command(text: Path | str, out: Path, *more: str) -> list[str]:
    return ["--input", str(text), "--output-prefix", str(out / "lib"), "--vocab-size", "280", *more]


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def documents(out: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(out / "lib_text_document"))
    return [dataset[number].tolist() for number in range(len(dataset))]


def trained_flags(out: Path) -> list[str]:
    files = ["--vocab-file", str(out / "lib-vocab.json"), "--merge-file", str(out / "lib-merges.txt")]
    return ["--tokenizer-type", "GPT2BPETokenizer", *files]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(start, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)


def test_megatron_core_reads_the_documents_back_as_text(text: Path, out: Path) -> None:
    assert prepare_data.main(command(text, out)) == 0
    assert sorted(contents(out)) == PRODUCTS
    vocab_file, merge_file = str(out / "lib-vocab.json"), str(out / "lib-merges.txt")
    tokenizer = build_tokenizer(
        TokenizerSettings(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)
    )
    assert tokenizer.vocab_size == 280
    prepared = documents(out)
    assert all(document[-1] == tokenizer.eod for document in prepared)
    originals = [path.read_text() for path in sorted(text.iterdir())]
    assert [tokenizer.detokenize(document[:-1]) for document in prepared] == originals


def test_the_summary_says_what_and_where_and_how_to_go_on(
    text: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare_data.main(command(text, out)) == 0
    printed = capsys.readouterr().out
    tokens = check_indexed_dataset(out / "lib_text_document").tokens
    assert f"tokens      {tokens:,} (uint16)" in printed
    assert "documents   6" in printed
    assert "vocabulary  280" in printed
    assert f"--data-path {out}/lib_text_document --tokenizer-type GPT2BPETokenizer" in printed


def test_equal_text_gives_equal_bytes_in_any_locale_and_with_any_number_of_workers(text: Path, out: Path) -> None:
    made = []
    variants = [("1", "C", "0"), ("2", "C.UTF-8", "1"), ("2", "POSIX", "2")]
    for number, (workers, locale, seed) in enumerate(variants):
        folder = out / str(number)
        done = run(*command(text, folder, "--workers", workers), LC_ALL=locale, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        made.append(contents(folder))
    assert made[0] == made[1] == made[2]


def test_torch_is_not_imported() -> None:
    code = "import sys; from scripts import prepare_data; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "False"


def test_no_append_eod_leaves_the_ends_out(text: Path, out: Path) -> None:
    assert prepare_data.main(command(text, out)) == 0
    with_ends = documents(out)
    assert prepare_data.main(command(text, out, "--no-append-eod")) == 0
    assert documents(out) == [document[:-1] for document in with_ends]


def test_a_given_tokenizer_gives_the_tokens_it_was_trained_to_give(text: Path, out: Path, tmp_path: Path) -> None:
    assert prepare_data.main(command(text, out)) == 0
    other = tmp_path / "other"
    assert prepare_data.main(command(text, other, *trained_flags(out))) == 0
    assert sorted(contents(other)) == ["lib-prepared.json", "lib_text_document.bin", "lib_text_document.idx"]
    assert documents(other) == documents(out)


def test_the_null_tokenizer_takes_ids(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids.jsonl").write_text('{"ids": "1 2 3"}\n{"ids": "279"}\n{"ids": "  "}\n')
    more = ["--tokenizer-type", "NullTokenizer", "--json-key", "ids"]
    assert prepare_data.main(command(tmp_path / "ids.jsonl", out, *more)) == 0
    assert documents(out) == [[1, 2, 3, 280], [279, 280]]
    assert "--tokenizer-type NullTokenizer --vocab-size 280" in capsys.readouterr().out


def test_many_batches_give_the_same_as_one(text: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare_data.main(command(text, out / "a")) == 0
    monkeypatch.setattr(prepare_data, "BATCH_CHARACTERS", 1500)
    assert prepare_data.main(command(text, out / "b")) == 0
    assert contents(out / "a") == contents(out / "b")


def test_bytes_that_are_not_utf8_are_counted(text: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text / "9.txt").write_bytes(b"caf\xe9 \xff")
    assert prepare_data.main(command(text, out)) == 0
    assert "replaced    2 characters" in capsys.readouterr().out


# Skipping


def skipped(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> bool:
    capsys.readouterr()
    assert prepare_data.main(arguments) == 0
    return "already prepared" in capsys.readouterr().out


def test_nothing_is_done_twice(text: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not skipped(capsys, command(text, out))
    before = {path: path.stat().st_ino for path in out.iterdir()}
    assert skipped(capsys, command(text, out, "--workers", "1"))
    assert {path: path.stat().st_ino for path in out.iterdir()} == before
    assert not skipped(capsys, command(text, out, "--force"))


@pytest.mark.parametrize("more", [["--vocab-size", "275"], ["--no-append-eod"]])
def test_another_setting_prepares_again(
    text: Path, out: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert not skipped(capsys, command(text, out))
    assert not skipped(capsys, command(text, out, *more))
    assert skipped(capsys, command(text, out, *more))


def test_another_text_prepares_again(text: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not skipped(capsys, command(text, out))
    path = text / "3.txt"
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"cat", b"dog"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not skipped(capsys, command(text, out))


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("how", ["gone", "cut", "changed", "nonsense"])
def test_a_damaged_output_is_prepared_again(
    text: Path, out: Path, capsys: pytest.CaptureFixture[str], name: str, how: str
) -> None:
    assert not skipped(capsys, command(text, out))
    whole = contents(out)
    match how:
        case "gone":
            (out / name).unlink()
        case "cut":
            (out / name).write_bytes(whole[name][:-1].rstrip(b"}\n"))
        case "changed":
            (out / name).write_bytes(whole[name].replace(b"1", b"2", 1) + b" ")
        case _:
            (out / name).write_bytes(b"[]")
    assert not skipped(capsys, command(text, out))
    assert contents(out) == whole


@pytest.mark.parametrize("part", ["files", "result", "text"])
@pytest.mark.parametrize("content", [None, [], {"a": 1}])
def test_a_record_with_a_damaged_part_is_not_believed(
    text: Path, out: Path, capsys: pytest.CaptureFixture[str], part: str, content: object
) -> None:
    assert not skipped(capsys, command(text, out))
    whole = contents(out)
    record = json.loads(whole["lib-prepared.json"])
    del record[part]
    (out / "lib-prepared.json").write_text(json.dumps(record if content is None else {**record, part: content}))
    assert not skipped(capsys, command(text, out))
    assert contents(out) == whole


# Kills


class Killed(BaseException):
    """Stands for the end of the process at one step."""


@pytest.mark.parametrize("step", range(5))
def test_a_crash_while_publishing_leaves_no_mixture(
    text: Path, out: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    assert prepare_data.main(command(text, out)) == 0
    old = contents(out)
    with monkeypatch.context() as patch:
        replace, calls = os.replace, iter(range(5))

        def crashing(source: Path, target: Path) -> None:
            if next(calls) == step:
                raise Killed
            replace(source, target)

        patch.setattr(os, "replace", crashing)
        with pytest.raises(Killed):
            prepare_data.main(command(text, out, "--vocab-size", "270"))
    if step < 4:
        with pytest.raises(DataError):
            check_indexed_dataset(out / "lib_text_document")
    else:
        assert check_indexed_dataset(out / "lib_text_document").documents == 6
    assert prepare_data.main(command(text, out)) == 0
    assert contents(out) == old


@pytest.mark.parametrize("step", ["_train", "_encode", "_file_digest", "_sync"])
def test_a_crash_before_publishing_leaves_the_old_dataset(
    text: Path, out: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    assert prepare_data.main(command(text, out)) == 0
    old = contents(out)

    def crash(*arguments: Any) -> None:
        raise Killed

    monkeypatch.setattr(prepare_data, step, crash)
    with pytest.raises(Killed):
        prepare_data.main(command(text, out, "--force"))
    assert contents(out) == old


def test_a_killed_run_leaves_no_final_name_and_the_next_one_tidies_up(text: Path, out: Path) -> None:
    process = subprocess.Popen([sys.executable, str(SCRIPT), *command("stdlib", out)], stdout=subprocess.DEVNULL)
    work = out / ".lib.preparing"
    deadline = time.monotonic() + 300
    while not (work.exists() and list(work.glob("*.bin"))):  # it encodes
        assert time.monotonic() < deadline, "the run never got to encoding"
        assert process.poll() is None, "the run ended too soon"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=300)
    assert [path.name for path in out.iterdir()] == [work.name]
    assert prepare_data.main(command(text, out)) == 0
    assert sorted(contents(out)) == PRODUCTS


def test_two_runs_for_one_prefix_do_not_mix(text: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = out / ".lib.preparing"
    work.mkdir(parents=True)
    handle = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert prepare_data.main(command(text, out)) == 2
    finally:
        os.close(handle)
    assert "another run is preparing" in capsys.readouterr().err
    assert prepare_data.main(command(text, out)) == 0


# What users get wrong


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Runs, expects one line on stderr and exit code 2, and returns the line."""
    try:
        code: Any = prepare_data.main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("prepare_data: ")
    assert printed.count("\n") == 1
    return printed


def test_a_missing_input_is_refused_and_makes_no_folder(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such input: /nowhere" in refused(capsys, command("/nowhere", out))
    assert not out.exists()


def test_an_empty_input_is_refused(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.txt").touch()
    assert "no text in the input" in refused(capsys, command(tmp_path, out))
    (tmp_path / "x.txt").write_text(" ")
    null = ["--tokenizer-type", "NullTokenizer"]
    assert "no document of the input has a token" in refused(capsys, command(tmp_path, out, *null))
    assert list(out.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Not a directory" in refused(capsys, command(text, text / "0.txt" / "sub"))
    assert "/proc/" in refused(capsys, command(text, Path("/proc/none")))
    assert "names a folder" in refused(capsys, ["--input", str(text), "--output-prefix", f"{text}/"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--vocab-siz", "300"], "unrecognized arguments: --vocab-siz"),
        (["--vocab-size", "0"], "'0' is not a whole number above 0"),
        (["--vocab-size", "256"], "--vocab-size is 256, expected 257 or more"),
        (["--workers", "-1"], "--workers"),
        (["--tokenizer-type", "BertTokenizer"], "invalid choice"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "needs --vocab-file"),
        (["--merge-file", "m.txt"], "--merge-file needs --tokenizer-type"),
        (["--tokenizer-type", "NullTokenizer"], "NullTokenizer reads token ids"),
    ],
)
def test_a_wrong_flag_is_refused(
    text: Path, out: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert message in refused(capsys, command(text, out, *more))


def test_the_record_holds_no_path_and_the_digests_of_the_outputs(text: Path, out: Path) -> None:
    assert prepare_data.main(command(text, out)) == 0
    record = (out / "lib-prepared.json").read_text()
    assert str(out) not in record
    assert str(text) not in record
    files = json.loads(record)["files"]
    assert files == {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in files}
    assert sorted([*files, "lib-prepared.json"]) == PRODUCTS
