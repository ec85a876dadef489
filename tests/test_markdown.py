"""Tables that Markdown readers take for tables, whatever is in their cells."""

import re

import pytest

from fcsd.markdown import table


@pytest.mark.parametrize("width", [0, 1, 2, 3, 9])
def test_the_rule_below_the_headings_is_valid_at_any_width(width: int) -> None:
    lines = table(["n" * width, "n" * width], [["7" * width, "8" * width]]).splitlines()
    left, right = (cell.strip() for cell in lines[1].strip("|").split("|"))
    assert re.fullmatch("---+", left) and re.fullmatch("-+-:", right)
    assert len({len(line) for line in lines}) == 1


def test_cells_cannot_break_the_table() -> None:
    lines = table(["model", "value"], [["a|b", "1\n2"]]).splitlines()
    assert len(lines) == 3
    assert [cell.strip() for cell in re.split(r"(?<!\\)\|", lines[2])[1:-1]] == ["a\\|b", "1 2"]


def test_a_table_without_rows_and_columns_of_text() -> None:
    assert table(["a", "b"], []) == "| a   | b   |\n| --- | --: |"
    assert table(["a", "b"], [], left=2).endswith("| --- | --- |")
