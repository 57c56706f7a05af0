"""Claims about the tokenizers; megatron-core is the reference where it has one that runs without downloads."""

import json
import math
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors, trainers

from megatron.training.indexed_writer import IndexedWriter
from megatron.training.tokenizer import (
    END_OF_DOCUMENT,
    Tokenizer,
    TokenizerError,
    TokenizerSettings,
    build_tokenizer,
    padded_vocab_size,
)

TEXT = ["the cat sat on the mat", "the hat sat on the cat", "a man and a mat"] * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds v-vocab.json and v-merges.txt, and the same as a tokenizer.json that adds to, cuts and pads every text."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.model.save(str(folder), "v")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_DOCUMENT} $A", special_tokens=[(END_OF_DOCUMENT, 0)]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=100)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def gpt2(folder: Path) -> Tokenizer:
    vocab_file, merge_file = str(folder / "v-vocab.json"), str(folder / "v-merges.txt")
    return build_tokenizer(
        TokenizerSettings(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)
    )


def hugging_face(path: Path) -> Tokenizer:
    return build_tokenizer(TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path)))


def null(vocab_size: int | None = 99) -> Tokenizer:
    return build_tokenizer(TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=vocab_size))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_importing_needs_neither_torch_nor_megatron_core() -> None:
    names = "tokenizer, data_files, indexed_writer, corpus"
    code = f"import sys; from megatron.training import {names}; print([m for m in sys.modules if 'torch' in m.lower()"
    code += " or m.startswith('megatron.core')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


@given(text=st.text())
@settings(deadline=None)
def test_gpt2_gives_any_text_back(folder: Path, text: str) -> None:
    tokenizer = gpt2(folder)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.tokenize_batch([text, "x", text]) == [ids, tokenizer.tokenize("x"), ids]


def test_gpt2_uses_its_merges_and_ends_documents_with_its_own_token(folder: Path) -> None:
    tokenizer = gpt2(folder)
    vocabulary = json.loads((folder / "v-vocab.json").read_text(encoding="utf-8"))
    assert tokenizer.vocab_size == len(vocabulary) == 270
    assert tokenizer.eod == vocabulary[END_OF_DOCUMENT] == 0
    assert tokenizer.tokenize(" the") == [vocabulary["Ġthe"]]
    assert tokenizer.detokenize([tokenizer.eod]) == END_OF_DOCUMENT


def test_the_end_token_written_in_a_text_does_not_end_the_document(folder: Path) -> None:
    tokenizer = gpt2(folder)
    assert tokenizer.eod not in tokenizer.tokenize(f"a {END_OF_DOCUMENT} b")


def test_hugging_face_adds_cuts_and_pads_nothing(folder: Path) -> None:
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = hugging_face(path)
        assert tokenizer.tokenize(TEXT[0]) == gpt2(folder).tokenize(TEXT[0])
        assert tokenizer.tokenize_batch(TEXT) == gpt2(folder).tokenize_batch(TEXT)
        assert (tokenizer.vocab_size, tokenizer.eod) == (270, 0)
        assert tokenizer.detokenize([tokenizer.eod]) == END_OF_DOCUMENT


@pytest.mark.parametrize("declared", [{"eos_token": "a"}, {"eos_token": {"content": "a", "lstrip": False}}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_hugging_face_takes_the_end_token_from_the_file_beside(copy: Path, name: str, declared: object) -> None:
    (copy / name).write_text(json.dumps(declared))
    tokenizer = hugging_face(copy)
    assert tokenizer.detokenize([tokenizer.eod]) == "a"
    assert tokenizer.unique_identifiers != gpt2(copy).unique_identifiers


def test_hugging_face_without_an_end_token_is_refused(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(TokenizerError, match="no such token"):
        hugging_face(copy)
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert hugging_face(copy).eod == 0
    text = (copy / "tokenizer.json").read_text(encoding="utf-8").replace(END_OF_DOCUMENT, "<|other|>")
    (copy / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match="does not say what ends a document"):
        hugging_face(copy)


def test_the_null_tokenizer_is_that_of_megatron_core() -> None:
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    ours, theirs = null(99), NullTokenizer(99)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod) == (100, 99)
    assert ours.tokenize("3 1 99") == theirs.text_to_ids("3 1 99")
    assert ours.detokenize([3, 1]) == theirs.ids_to_text([3, 1])


@pytest.mark.parametrize("text", ["a", "1 x", "100", "-1", "1.5"])
def test_the_null_tokenizer_refuses_what_is_not_an_id(text: str) -> None:
    with pytest.raises(TokenizerError, match="NullTokenizer"):
        null(99).tokenize(text)


def test_megatron_core_builds_its_dataset_with_our_tokenizer(folder: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    for tokenizer in (gpt2(folder), hugging_face(folder), null(269)):
        with IndexedWriter(tmp_path / "d.bin", tmp_path / "d.idx", "uint16") as writer:
            for _ in range(20):
                writer.add_document([5, 6, 7, 8, tokenizer.eod])
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=8,
            blend=([str(tmp_path / "d")], None),
            split="1",
            path_to_cache=str(tmp_path / "cache"),
            tokenizer=tokenizer,
            reset_position_ids=True,
            reset_attention_mask=False,
            eod_mask_loss=True,
        )
        train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [10, 0, 0], lambda: True, config).build()
        for number in range(10):
            sample = train[number]
            ends = np.asarray(sample["tokens"]) == tokenizer.eod
            assert ends.any()
            assert np.array_equal(np.asarray(sample["loss_mask"]) == 0, ends)


@pytest.mark.parametrize("build", [gpt2, hugging_face, lambda folder: null()])
def test_a_pickled_tokenizer_is_the_same(folder: Path, build: Callable[[Path], Tokenizer]) -> None:
    tokenizer = build(folder)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.unique_identifiers == tokenizer.unique_identifiers
    assert again.tokenize("1 2 3") == tokenizer.tokenize("1 2 3")


def test_identifiers_follow_the_contents_and_not_the_path(folder: Path, copy: Path) -> None:
    assert gpt2(copy).unique_identifiers == gpt2(folder).unique_identifiers
    assert hugging_face(copy).unique_identifiers == hugging_face(folder).unique_identifiers
    merges = copy / "v-merges.txt"
    merges.write_text("\n".join(merges.read_text(encoding="utf-8").split("\n")[:-2]), encoding="utf-8")
    assert gpt2(copy).unique_identifiers != gpt2(folder).unique_identifiers
    assert null(5).unique_identifiers != null(6).unique_identifiers


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v-vocab.json", b"{", "--vocab-file .*not JSON"),
        ("v-vocab.json", b"[1]", "expected one JSON object"),
        ("v-vocab.json", b'{"a": true}', "expected one JSON object"),
        ("v-vocab.json", b'{"a": 1, "b": 1}', "one id to two tokens"),
        ("v-vocab.json", b'{"a": 0}', "no <.endoftext.>"),
        ("v-vocab.json", b'{"a": 0, "<|endoftext|>": 1}', "no token for 255 of the 256 bytes"),
        ("v-vocab.json", b"\xff", "not UTF-8"),
        ("v-merges.txt", b"#version: 0.2\na b c\n", "line 2: expected two tokens"),
        ("v-merges.txt", b"q z\n", "'qz', which --vocab-file .* lacks"),
        ("tokenizer.json", b"{", "not a whole tokenizer.json"),
        ("tokenizer.json", b"[]", "not a whole tokenizer.json"),
        ("tokenizer.json", b'{"model": {}}', "not a whole tokenizer.json"),
    ],
)
def test_a_damaged_file_is_named(copy: Path, name: str, content: bytes, message: str) -> None:
    (copy / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        hugging_face(copy) if name == "tokenizer.json" else gpt2(copy)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named_and_nothing_is_downloaded(copy: Path) -> None:
    (copy / "v-merges.txt").unlink()
    with pytest.raises(TokenizerError, match=r"--merge-file .*v-merges\.txt: No such file"):
        gpt2(copy)
    with pytest.raises(TokenizerError, match=r"--tokenizer-model gpt2: No such file.*local"):
        hugging_face(Path("gpt2"))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GPT2BPETokenizer", "needs --vocab-file"),
        ("HuggingFaceTokenizer", "needs --tokenizer-model"),
        ("NullTokenizer", "--vocab-size is None"),
        ("SentencePiece", "is not known; expected one of GPT2BPETokenizer"),
    ],
)
def test_missing_settings_are_named(kind: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(TokenizerSettings(tokenizer_type=kind))


@given(st.integers(1, 300_000), st.sampled_from([1, 64, 128, 1000]), st.sampled_from([1, 2, 8]))
def test_the_padded_vocabulary_is_the_next_multiple(vocab_size: int, divisible_by: int, tp: int) -> None:
    padded = padded_vocab_size(vocab_size, divisible_by, tp)
    assert padded == math.ceil(vocab_size / (divisible_by * tp)) * divisible_by * tp
    assert padded - divisible_by * tp < vocab_size <= padded


def test_the_padded_vocabulary_of_gpt2_is_the_known_one() -> None:
    assert padded_vocab_size(50257, 128, 1) == 50304
    assert padded_vocab_size(50257, 128, 8) == 51200
    with pytest.raises(TokenizerError, match="tensor parallel size 0"):
        padded_vocab_size(50257, 128, 0)
