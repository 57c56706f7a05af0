"""How a field of a settings dataclass becomes a command-line flag. Pure; imported by every file of this folder.

A flag's name is the field's with dashes, unless `flag(name=...)` says otherwise; its type comes from the annotation;
its help text is the docstring under the field. A bool becomes a switch that flips the default.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSpec:
    """One flag: `field_name` of its dataclass, `names` on the command line, `many` when it takes several values."""

    field_name: str
    names: tuple[str, ...]
    value_type: type
    default: Any
    choices: tuple[str, ...] | None
    many: bool
    help: str

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.value_type is bool


def flag(default: Any, *, names: Sequence[str] = (), choices: Sequence[str] | None = None) -> Any:
    """A field whose flag has other `names` than its own, or a closed set of `choices`."""
    metadata = {"names": tuple(names), "choices": tuple(choices) if choices else None}
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def flags_of(settings_type: type) -> tuple[FlagSpec, ...]:
    """The flags of one settings dataclass, in the order of its fields. AssertionError for a field without docstring."""
    documents = _field_docstrings(settings_type)
    hints = typing.get_type_hints(settings_type)
    specs = []
    for field in dataclasses.fields(settings_type):
        value_type, many = _value_type(hints[field.name])
        assert field.name in documents, f"{settings_type.__name__}.{field.name} has no docstring under it"
        specs.append(
            FlagSpec(
                field_name=field.name,
                names=field.metadata.get("names") or ("--" + field.name.replace("_", "-"),),
                value_type=value_type,
                default=field.default,
                choices=field.metadata.get("choices"),
                many=many,
                help=documents[field.name],
            )
        )
    return tuple(specs)


def _value_type(hint: Any) -> tuple[type, bool]:
    """(type of one value, whether a tuple of them is meant); `X | None` counts as X."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _field_docstrings(settings_type: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(settings_type)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    found = {}
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found
