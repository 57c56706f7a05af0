"""From a command line (and a YAML file) to `Settings`: Megatron-LM's flags, ours, and a clear word on every other.

Called by `pretrain()` and by the preflight; imports no torch. What a flag means stands in `config/`; which of
Megatron-LM's flags are ignored or refused stands in `megatron_flags.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron.training.config import SUBJECTS, Settings, SettingsError
from megatron.training.config.flag import FlagSpec, flags_of
from megatron.training.megatron_flags import MEGATRON_FLAGS, Takes, Verdict

_ONLY_AS_FLAGS = ("yaml_cfg", "preflight_only")
"""Fields that are read before the YAML file is."""


class IgnoredFlagWarning(UserWarning):
    """A Megatron-LM flag that changes nothing here was given."""


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are SettingsErrors instead of exits."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def parse_settings(argv: Sequence[str]) -> Settings:
    """Settings that `argv` and the YAML file it may name say. Flags on the command line win over the file.

    Raises SettingsError in one line for anything that cannot be taken; warns IgnoredFlagWarning for flags of
    Megatron-LM that have no effect here.
    """
    parser = build_parser()
    known = _drop_foreign_flags(list(argv))
    yaml_file = parser.parse_args(known).yaml_cfg
    if yaml_file is not None:
        known = _yaml_as_flags(Path(yaml_file)) + known
    values = vars(parser.parse_args(known))
    return Settings(
        **{
            subject: settings_type(
                **{spec.field_name: _frozen(values[spec.field_name]) for spec in flags_of(settings_type)}
            )
            for subject, settings_type in SUBJECTS.items()
        }
    )


def build_parser() -> argparse.ArgumentParser:
    """The argparse parser with one flag for each settings field."""
    parser = _Parser(prog="pretrain_gpt.py", allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for subject, settings_type in SUBJECTS.items():
        group = parser.add_argument_group(subject, (settings_type.__doc__ or "").split("\n", maxsplit=1)[0])
        for spec in flags_of(settings_type):
            group.add_argument(*spec.names, **_argparse_options(spec))
    return parser


def known_flags() -> dict[str, FlagSpec]:
    """Every flag name the trainer implements, with its meaning."""
    return {
        name: spec for settings_type in SUBJECTS.values() for spec in flags_of(settings_type) for name in spec.names
    }


def settings_as_dict(settings: Settings) -> dict[str, Any]:
    """Plain nested values of `settings`, for logs and checkpoints."""
    return dataclasses.asdict(settings)


def _argparse_options(spec: FlagSpec) -> dict[str, Any]:
    options: dict[str, Any] = {"dest": spec.field_name, "default": spec.default, "help": spec.help.replace("%", "%%")}
    if spec.is_switch:
        return {**options, "action": "store_false" if spec.default else "store_true"}
    options["type"] = _finite if spec.value_type is float else spec.value_type
    options["metavar"] = spec.field_name.upper() if not spec.choices else None
    if spec.choices:
        options["choices"] = spec.choices
    if spec.many:
        options["nargs"] = "+"
    return options


def _finite(text: str) -> float:
    """The number that `text` says. No setting means anything as infinity or as what is not a number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a finite number")
    return value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _drop_foreign_flags(argv: list[str]) -> list[str]:
    """`argv` without the flags that are ignored; SettingsError for refused and unknown ones."""
    known = known_flags()
    kept: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        name = word.split("=", 1)[0]
        position += 1
        if not name.startswith("--") or name in known or name == "--help":
            kept.append(word)
            continue
        foreign = MEGATRON_FLAGS.get(name)
        if foreign is None:
            raise SettingsError(_unknown_flag(name, [*known, *MEGATRON_FLAGS]))
        if foreign.verdict is Verdict.REFUSED:
            raise SettingsError(f"found {name}, which is refused: {foreign.reason}; leave it out")
        warnings.warn(f"{name} is ignored: {foreign.reason}", IgnoredFlagWarning, stacklevel=3)
        position += 0 if "=" in word else _values_of(foreign.takes, argv[position:])
    return kept


def _values_of(takes: Takes, following: Sequence[str]) -> int:
    """How many of the words after an ignored flag belong to it."""
    count = 0
    limit = {Takes.NONE: 0, Takes.ONE: 1, Takes.OPTIONAL_ONE: 1}.get(takes, len(following))
    for word in following:
        if count == limit or word.startswith("--"):
            break
        count += 1
    return count


def _unknown_flag(name: str, candidates: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else "; --help lists all flags"
    return f"found unknown flag {name}{hint}"


def _yaml_as_flags(path: Path) -> list[str]:
    """The settings of a YAML file, as the words of a command line. Keys are field or flag names, flat or by subject."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--yaml-cfg {path}: {error.strerror}; give a readable YAML file") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date that no calendar has
        raise SettingsError(f"--yaml-cfg {path}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise SettingsError(f"--yaml-cfg {path}: found {type(content).__name__}, expected a mapping of settings")
    by_key = {key: spec for name, spec in known_flags().items() for key in (spec.field_name, name.lstrip("-"))}
    words: list[str] = []
    for key, value in _flattened(content):
        spec = by_key.get(key)
        if spec is None:
            near = difflib.get_close_matches(key, list(by_key), n=1)
            raise SettingsError(
                f"--yaml-cfg {path}: unknown key {key}" + (f"; did you mean {near[0]}?" if near else "")
            )
        if spec.field_name in _ONLY_AS_FLAGS:
            raise SettingsError(f"--yaml-cfg {path}: {key} works on the command line only; move it there")
        words += _as_words(path, key, spec, value)
    return words


def _flattened(content: dict[Any, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in content.items():
        if str(key) in SUBJECTS and isinstance(value, dict):
            yield from ((str(inner), inner_value) for inner, inner_value in value.items())
        else:
            yield str(key), value


def _as_words(path: Path, key: str, spec: FlagSpec, value: Any) -> list[str]:
    if value is None:
        return []
    if not spec.is_switch:
        values = value if isinstance(value, list) and spec.many else [value]
        if not all(_may_be_value(item, spec) for item in values):
            raise SettingsError(f"--yaml-cfg {path}: {key} is {value!r}, expected {_expected(spec)}")
        # One value is joined to the flag, so that it is a value even if it starts with a dash.
        return [spec.names[0], *map(str, values)] if spec.many else [f"{spec.names[0]}={value}"]
    if not isinstance(value, bool):
        raise SettingsError(f"--yaml-cfg {path}: {key} is {value!r}, expected true or false")
    # A key is the field's own name, or the flag's, whose presence flips the default.
    wanted = value if key == spec.field_name else spec.default != value
    return [spec.names[0]] if wanted != spec.default else []


def _may_be_value(item: Any, spec: FlagSpec) -> bool:
    """Whether a YAML scalar or list can stand for a value; one of several must not look like the next flag."""
    return item is not None and not isinstance(item, bool | dict) and not (spec.many and str(item).startswith("--"))


def _expected(spec: FlagSpec) -> str:
    word = {int: "a whole number", float: "a number"}.get(spec.value_type, "a text")
    return f"{word}, or a list of them" if spec.many else word
