"""The table of plans of large models is that of the recipes."""

import pytest
from scripts import write_plans as script


@pytest.mark.nightly
def test_the_table_is_fresh() -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text) == text, "run python scripts/write_plans.py"
