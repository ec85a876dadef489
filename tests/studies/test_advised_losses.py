"""The rows of measured losses follow from the raw files."""

import json
from pathlib import Path

import pytest
from studies.real.losses import FILE, updated

pytestmark = pytest.mark.lab


def test_the_file_is_up_to_date(repo: Path) -> None:
    assert json.loads((repo / FILE).read_text()) == updated(repo)
