"""The all-reduces of ``fcsd advise`` follow from the raw files."""

import json
from pathlib import Path

import pytest
from benchmarks.comm.sums_of_advice import FILE, content

pytestmark = pytest.mark.lab


def test_the_file_is_up_to_date(repo: Path) -> None:
    assert json.loads((repo / FILE).read_text()) == content(repo)
