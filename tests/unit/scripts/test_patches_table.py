"""The page of patches is what the patches say."""

from __future__ import annotations

from pathlib import Path

from scripts.patches_table import table


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "patches.md"
    assert page.read_text(encoding="utf-8") == table()
