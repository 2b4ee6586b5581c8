"""The table of first learning rates in README.md is what axolotl_supertune/method/selected_rates.py prints."""

from pathlib import Path

from axolotl_supertune.method.selected_rates import markdown_table

README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- first rates: python -m axolotl_supertune.method.selected_rates -->\n"
END = "<!-- end of first rates -->\n"


def test_the_readme_shows_the_selected_rates():
    _, begin, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    table, end, _ = rest.partition(END)
    assert (begin, end) == (BEGIN, END), "README.md keeps the table between these two comments"
    assert table.strip() == markdown_table().strip()
