"""Claims about what tells two runs apart: what training depends on does, where things lie does not."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.training.indexed_writer import IndexedWriter
from megatron.training.layout import Plan
from megatron.training.preflight import plan_run
from megatron.training.run_facts import PIECES, data_facts, script_fact, setting_facts

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64"
RUN = "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3"
BASE = f"{MODEL} {RUN} --tokenizer-type NullTokenizer --vocab-size 100 --mock-data"
REAL = f"{MODEL} {RUN} --tokenizer-type NullTokenizer --vocab-size 100 --split 100,0,0"


def plan(flags: str) -> Plan:
    return plan_run(shlex.split(flags), world_size=1, on_cuda=False, joins=True)[0]


def digest(flags: str) -> str:
    return setting_facts(plan(flags))[1]


def write_data(prefix: Path, *, first: int = 0, documents: int = 5, tokens: int = 80) -> None:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), "uint16") as writer:
        for start in range(first, first + documents):
            writer.add_document([(start + token) % 100 for token in range(tokens)])


def data_of(paths: str) -> tuple[str, ...]:
    return data_facts(plan(f"{REAL} --data-path {paths}"))


def test_the_order_of_flags_and_where_they_stand_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("num_layers: 4\nhidden_size: 64\n")
    from_file = BASE.replace("--num-layers 4 --hidden-size 64", f"--yaml-cfg {tmp_path}/settings.yaml")
    assert digest(BASE) == digest(f"{RUN} {BASE.replace(RUN, '')}") == digest(from_file)
    (tmp_path / "settings.yaml").write_text("num_layers: 3\nhidden_size: 64\n")
    assert digest(from_file) != digest(BASE)


@pytest.mark.parametrize(
    "more",
    [
        *("--num-layers 3", "--seed 3", "--lr 2e-3", "--swiglu", "--attention-dropout 0.2", "--train-iters 11"),
        *("--eval-interval 7", "--clip-grad 0.5", "--vocab-size 500", "--make-vocab-size-divisible-by 64", "--bf16"),
        *("--save elsewhere", "--no-save-optim", "--recompute-activations", "--log-params-norm"),
    ],
)
def test_what_training_and_its_checkpoints_depend_on_counts(more: str) -> None:
    assert digest(f"{BASE} {more}") != digest(BASE)


@pytest.mark.parametrize(
    "more", ["--load nowhere", "--tensorboard-dir logs", "--metrics-file m.jsonl", "--local-rank 1"]
)
def test_where_logs_go_and_what_was_loaded_does_not_count(more: str) -> None:
    assert digest(f"{BASE} {more}") == digest(BASE)


def test_another_vocabulary_counts_even_if_it_is_padded_to_as_many_words() -> None:
    assert plan(f"{BASE} --vocab-size 101").padded_vocab_size == plan(BASE).padded_vocab_size
    assert digest(f"{BASE} --vocab-size 101") != digest(BASE)


def test_settings_are_shown_as_flags_where_they_are_not_the_default() -> None:
    shown = setting_facts(plan(f"{BASE} --swiglu"))[0]
    assert {"--num-layers=4", "--swiglu=yes", "--lr=0.001", "world_size=1", "padded_vocab_size=128"} <= set(shown)
    assert not [line for line in shown if line.startswith(("--clip-grad", "--yaml-cfg"))]


def test_a_folder_to_save_in_is_the_same_wherever_the_process_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = digest(f"{BASE} --save checkpoints")
    assert relative == digest(f"{BASE} --save {tmp_path}/checkpoints")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert digest(f"{BASE} --save checkpoints") != relative


def test_data_counts_by_its_content_and_not_by_its_folder(tmp_path: Path) -> None:
    write_data(tmp_path / "here" / "text")
    write_data(tmp_path / "there" / "text")
    assert data_of(f"{tmp_path}/here/text") == data_of(f"{tmp_path}/there/text")
    assert [line.partition("=")[0] for line in data_of(f"{tmp_path}/here/text")] == [
        "--data-path 0 text.idx",
        "--data-path 0 text.bin",
    ]
    write_data(tmp_path / "there" / "text", first=1)  # the same index, other tokens
    here, there = data_of(f"{tmp_path}/here/text"), data_of(f"{tmp_path}/there/text")
    assert (here[0] == there[0], here[1] == there[1]) == (True, False)
    write_data(tmp_path / "there" / "text", documents=4, tokens=100)  # as many tokens, another index
    there = data_of(f"{tmp_path}/there/text")
    assert here[0] != there[0]
    assert data_of(f"0.3 {tmp_path}/here/text 0.7 {tmp_path}/there/text") != data_of(
        f"0.4 {tmp_path}/here/text 0.6 {tmp_path}/there/text"
    )


def test_of_a_large_file_both_ends_and_pieces_between_are_looked_at(tmp_path: Path) -> None:
    write_data(tmp_path / "text", documents=20, tokens=50_000)
    path = tmp_path / "text.bin"
    size = path.stat().st_size
    assert size > PIECES << 12
    before = data_of(f"{tmp_path}/text")
    for offset in (0, (size - 4096) * 100 // (PIECES - 1), size - 1):
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)
        changed = data_of(f"{tmp_path}/text")
        assert changed[1] != before[1], offset
        before = changed


def test_files_of_the_tokenizer_count(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("1")
    mock = plan(BASE)

    def told(**files: Any) -> tuple[str, ...]:
        data = dataclasses.replace(mock.settings.data, **files)
        return data_facts(dataclasses.replace(mock, settings=dataclasses.replace(mock.settings, data=data)))

    both = {"vocab_file": f"{tmp_path}/vocab.json", "merge_file": f"{tmp_path}/merges.txt"}
    before = told(**both)
    assert [line.partition("=")[0] for line in before[1:]] == ["--vocab-file vocab.json", "--merge-file merges.txt"]
    assert told(tokenizer_model=str(tmp_path))[1:] == tuple(
        f"--tokenizer-model {line.partition(' ')[2]}" for line in before[:0:-1]
    )
    (tmp_path / "vocab.json").write_text("2")
    assert (told(**both)[1] == before[1], told(**both)[2] == before[2]) == (False, True)
    assert told(tokenizer_model="some/model")[1:] == ("--tokenizer-model=some/model",)


def test_the_script_counts_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("a = 1\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    before = script_fact()
    assert before.startswith("train.py=")
    script.write_text("a = 2\n")
    assert script_fact() != before
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "none.py"))
    assert script_fact() == ""
