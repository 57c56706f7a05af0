"""Claims about the list of flags for users."""

from pathlib import Path

from megatron.training.arguments import known_flags
from megatron.training.megatron_flags import MEGATRON_FLAGS, Verdict
from scripts import flags_table

PAGE = Path(flags_table.__file__).parents[1] / "docs" / "flags.md"


def test_the_page_is_what_the_script_prints() -> None:
    assert PAGE.read_text(encoding="utf-8") == flags_table.flags_table()


def test_every_flag_has_one_row_in_its_own_part() -> None:
    page = flags_table.flags_table()
    implemented, rest = page.split("## Ignored\n")
    ignored, refused = rest.split("## Refused\n")
    for name, spec in known_flags().items():
        (row,) = [line for line in implemented.splitlines() if line.startswith("|") and f"`{name}" in _names(line)]
        assert spec.help in row
    for name, flag in MEGATRON_FLAGS.items():
        part, other = (ignored, refused) if flag.verdict is Verdict.IGNORED else (refused, ignored)
        (row,) = [line for line in part.splitlines() if line.startswith(("| `" + name + "`", "| `" + name + " "))]
        assert row.endswith(f"| {flag.reason} |")
        assert f"`{name}`" not in other


def test_every_row_has_as_many_cells_as_its_table() -> None:
    widths = set()
    for line in flags_table.flags_table().splitlines():
        if line.startswith("|---"):
            widths.add(line.count("|"))
        elif line.startswith("| `"):
            assert line.count("|") in widths


def _names(row: str) -> set[str]:
    """Names in the first cell, each with the backtick before it."""
    return {word.rstrip("`,") for word in row.split("|")[1].split() if word.startswith("`--")}
