"""Prints docs/patches.md from the patches themselves: `python scripts/patches_table.py > docs/patches.md`."""

from __future__ import annotations

from megatron.resilience.patches.registry import all_patches


def table() -> str:
    """The page: one row a patch."""
    lines = [
        "# What is repaired in megatron-core",
        "",
        "Made by `scripts/patches_table.py`. Each patch is reversible and has a test that fails without it.",
        "It knows the source that it replaces, by its SHA-256, and refuses another one by name.",
        "",
        "| patch | target | versions | why |",
        "|---|---|---|---|",
    ]
    for patch in all_patches():
        module = patch.module.removeprefix("megatron.core.")
        where = "without CUDA" if patch.cpu_only else "always"
        lines.append(f"| {patch.name} ({where}) | `{module}`: `{patch.attribute}` | {patch.versions} | {patch.why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
