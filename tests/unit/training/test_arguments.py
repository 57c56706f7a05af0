"""Claims about reading a command line and a YAML file; what a flag means is tested in `config/test_flag.py`."""

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.arguments import (
    IgnoredFlagWarning,
    build_parser,
    known_flags,
    parse_settings,
    settings_as_dict,
)
from megatron.training.config import Settings, SettingsError
from megatron.training.megatron_flags import MEGATRON_FLAGS, Takes, Verdict

IGNORED = [name for name, flag in MEGATRON_FLAGS.items() if flag.verdict is Verdict.IGNORED]
REFUSED = [name for name, flag in MEGATRON_FLAGS.items() if flag.verdict is Verdict.REFUSED]
WORDS = {Takes.NONE: [], Takes.ONE: ["1"], Takes.OPTIONAL_ONE: ["1"], Takes.MANY: ["1", "2", "3"]}


def yaml_file(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return ["--yaml-cfg", str(path)]


def complaint(argv: list[str]) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_settings(argv)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def test_no_flags_give_the_defaults() -> None:
    assert parse_settings([]) == Settings()


def test_values_arrive_with_their_types_and_places() -> None:
    argv = "--num-layers 4 --lr=1e-4 --bf16 --disable-bias-linear --rampup-batch-size 2 2 100 --data-path 0.3 a 0.7 b"
    found = parse_settings(argv.split())
    assert found.model.num_layers == 4
    assert found.model.add_bias_linear is False
    assert found.optimizer.lr == 1e-4
    assert found.run.bf16 is True
    assert found.run.rampup_batch_size == (2, 2, 100)
    assert found.data.data_path == ("0.3", "a", "0.7", "b")
    assert settings_as_dict(found)["run"]["rampup_batch_size"] == (2, 2, 100)


def test_the_last_of_two_equal_flags_wins() -> None:
    assert parse_settings(["--seed", "1", "--seed", "2"]).run.seed == 2


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        (["--num_layers", "4"], "--num-layers"),
        (["--hidden-sizes", "4"], "--hidden-size"),
        (["--num-layer=4"], "--num-layers"),
        (["--global-batch", "4"], "--global-batch-size"),
        (["--wandb-projekt", "x"], "--wandb-project"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_nearest(argv: list[str], nearest: str) -> None:
    assert complaint(argv) == f"found unknown flag {argv[0].split('=')[0]}; did you mean {nearest}?"


def test_a_flag_like_no_other_points_to_the_help() -> None:
    assert complaint(["--zzzzqqq"]) == "found unknown flag --zzzzqqq; --help lists all flags"


def test_an_abbreviation_is_not_taken_for_a_flag() -> None:
    assert "did you mean" in complaint(["--num-lay", "4"])


@pytest.mark.parametrize(
    "argv",
    [
        ["stray"],
        ["--bf16", "stray"],
        ["--bf16=yes"],
        ["-x"],
        ["--"],
        ["--num-layers"],
        ["--num-layers", "four"],
        ["--num-layers", "4.0"],
        ["--num-layers", "4", "5"],
        ["--data-path"],
        ["--rampup-batch-size", "1", "x", "3"],
        ["--normalization", "BatchNorm"],
        ["--profile", "stray"],
    ],
)
def test_what_cannot_be_read_is_one_line(argv: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredFlagWarning)
        assert complaint(argv)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "one"])
def test_a_number_must_be_finite(text: str) -> None:
    assert f"found '{text}', expected a finite number" in complaint([f"--clip-grad={text}"])


@pytest.mark.parametrize("name", IGNORED)
def test_an_ignored_flag_warns_and_swallows_its_own_values_only(name: str) -> None:
    with pytest.warns(IgnoredFlagWarning) as caught:
        found = parse_settings(["--bf16", name, *WORDS[MEGATRON_FLAGS[name].takes], "--num-layers", "4"])
    assert [str(item.message) for item in caught] == [f"{name} is ignored: {MEGATRON_FLAGS[name].reason}"]
    assert (found.run.bf16, found.model.num_layers) == (True, 4)


def test_an_ignored_flag_may_carry_its_value() -> None:
    with pytest.warns(IgnoredFlagWarning):
        assert parse_settings(["--wandb-project=x", "--seed", "5"]).run.seed == 5


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_flag_says_why(name: str) -> None:
    text = complaint([name, *WORDS[MEGATRON_FLAGS[name].takes]])
    assert text == f"found {name}, which is refused: {MEGATRON_FLAGS[name].reason}; leave it out"


@pytest.mark.parametrize(
    "text", ["num_layers: 4\nlr: 1.0e-3", "num-layers: 4\nlr: 1e-3", "model:\n  num_layers: 4\nlr: '0.001'"]
)
def test_yaml_keys_are_fields_or_flags_flat_or_by_subject(tmp_path: Path, text: str) -> None:
    found = parse_settings(yaml_file(tmp_path, text))
    assert (found.model.num_layers, found.optimizer.lr) == (4, 1e-3)


def test_a_flag_wins_over_the_yaml_file_wherever_it_stands(tmp_path: Path) -> None:
    from_file = yaml_file(tmp_path, "num_layers: 4\nhidden_size: 64\ndata_path: [a, b]\nbf16: true")
    for argv in (["--num-layers", "8", *from_file], [*from_file, "--num-layers", "8"]):
        found = parse_settings(argv)
        assert (found.model.num_layers, found.model.hidden_size, found.run.bf16) == (8, 64, True)
    assert parse_settings([*from_file, "--data-path", "c"]).data.data_path == ("c",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add_bias_linear: true", True),
        ("add_bias_linear: false", False),
        ("disable-bias-linear: true", False),
        ("disable-bias-linear: false", True),
    ],
)
def test_a_yaml_switch_is_the_field_or_the_presence_of_the_flag(tmp_path: Path, text: str, expected: bool) -> None:
    assert parse_settings(yaml_file(tmp_path, text)).model.add_bias_linear is expected


def test_yaml_lists_and_nothings(tmp_path: Path) -> None:
    text = "rampup_batch_size: [2, 2, 100]\nsave: null\nmoe_layer_freq: [0, 1, 1]\ndata_path: one"
    found = parse_settings(yaml_file(tmp_path, text))
    assert found.run.rampup_batch_size == (2, 2, 100)
    assert found.checkpoint.save is None
    assert found.moe.moe_layer_freq == "[0, 1, 1]"
    assert found.data.data_path == ("one",)


def test_a_yaml_value_is_never_taken_for_a_flag(tmp_path: Path) -> None:
    assert parse_settings(yaml_file(tmp_path, "save: --bf16")).checkpoint.save == "--bf16"
    assert "data_path" in complaint(yaml_file(tmp_path, "data_path: [a, --bf16]"))
    assert "unrecognized arguments: stray" in complaint(["stray", *yaml_file(tmp_path, "data_path: [a]")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "found NoneType, expected a mapping"),
        ("- a", "found list"),
        ("just words", "found str"),
        ("a: [1", "not YAML"),
        ("a: b: c", "not YAML"),
        ("\t- x", "not YAML"),
        ("seed: 2020-13-45", "not YAML"),
        ("seed: \x01", "not YAML"),
        ("? [a, b]\n: 1", "not YAML"),
        ("num_leyers: 4", "unknown key num_leyers; did you mean num_layers?"),
        ("model:\n  num_leyers: 4", "did you mean num_layers?"),
        ("model: 4", "unknown key model"),
        ("3: 4", "unknown key 3"),
        ("num_layers: four", "--num-layers: invalid int value: 'four'"),
        ("num_layers: true", "num_layers is True, expected a whole number"),
        ("lr: {a: 1}", "lr is {'a': 1}, expected a number"),
        ("save: yes", "save is True, expected a text"),
        ("rampup_batch_size: [1, null, 3]", "expected a whole number, or a list of them"),
        ("num_layers: [1, 2]", "invalid int value"),
        ("bf16: 1", "bf16 is 1, expected true or false"),
        ("bf16: 'yes'", "expected true or false"),
        ("normalization: BatchNorm", "invalid choice"),
        ("yaml_cfg: other.yaml", "works on the command line only"),
        ("preflight-only: true", "works on the command line only"),
    ],
)
def test_bad_yaml_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in complaint(yaml_file(tmp_path, text))


def test_a_yaml_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in complaint(["--yaml-cfg", str(tmp_path / "absent.yaml")])
    assert "Is a directory" in complaint(["--yaml-cfg", str(tmp_path)])
    assert complaint(["--yaml-cfg", ""])
    (tmp_path / "latin.yaml").write_bytes(b"save: caf\xe9")
    assert "not YAML" in complaint(["--yaml-cfg", str(tmp_path / "latin.yaml")])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([*known_flags(), *MEGATRON_FLAGS, "1", "-1", "x", "", "--x", "1e-3"]), max_size=6))
def test_any_words_give_settings_or_a_settings_error(argv: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredFlagWarning)
        with contextlib.suppress(SettingsError):
            assert isinstance(parse_settings([word for word in argv if word != "--yaml-cfg"]), Settings)


YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(deadline=None, max_examples=60)
@given(content=st.dictionaries(st.sampled_from([spec.field_name for spec in known_flags().values()]), YAML_VALUES))
def test_any_yaml_values_give_settings_or_a_settings_error(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(content, allow_unicode=False))
    with contextlib.suppress(SettingsError):
        assert isinstance(parse_settings(["--yaml-cfg", str(path)]), Settings)


def test_help_is_written_without_a_program_error() -> None:
    assert "--num-layers NUM_LAYERS" in build_parser().format_help()
