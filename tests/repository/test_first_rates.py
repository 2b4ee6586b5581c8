"""The table of first learning rates in README.md is what axolotl_supertune/method/selected_rates.py prints."""

from pathlib import Path

import pytest

from axolotl_supertune.method.selected_rates import markdown_table

README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- first rates: python -m axolotl_supertune.method.selected_rates -->\n"
END = "<!-- end of first rates -->\n"


def test_the_readme_shows_the_selected_rates():
    text = README.read_text(encoding="utf-8")
    if BEGIN not in text:
        pytest.skip("README.md has no table of first rates yet")
    assert text.partition(BEGIN)[2].partition(END)[0] == markdown_table()
