"""What can be known of a training script without running it: whether it can check its arguments, and what it imports.

The launcher asks before it starts anything; the spawner asks for the modules it should import once for all its ranks.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """Read from the script's top level."""

    preload: tuple[str, ...]
    """Modules named by a literal `PRELOAD = ("module", ...)`; none if there is no such line."""
    has_preflight: bool
    """Whether the script defines `preflight`, and so understands --preflight-only."""


def read_script_facts(script: Path) -> ScriptFacts:
    """Parses `script`. Raises ValueError if it is no Python or PRELOAD no literal, OSError if it can't be read."""
    try:
        tree = ast.parse(script.read_bytes(), filename=str(script))
    except SyntaxError as error:
        raise ValueError(f"{script}, line {error.lineno}: {error.msg}") from error
    preload: tuple[str, ...] = ()
    has_preflight = False
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "preflight":
            has_preflight = True
        value = _assigned_to_preload(statement)
        if value is not None:
            preload = _literal_names(value, script)
    return ScriptFacts(preload=preload, has_preflight=has_preflight)


def _assigned_to_preload(statement: ast.stmt) -> ast.expr | None:
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        return None
    named = any(isinstance(target, ast.Name) and target.id == "PRELOAD" for target in targets)
    return statement.value if named else None


def _literal_names(value: ast.expr, script: Path) -> tuple[str, ...]:
    try:
        names = ast.literal_eval(value)
    except ValueError:
        names = None
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{script}, line {value.lineno}: PRELOAD must be a literal tuple of module names")
    return tuple(names)
