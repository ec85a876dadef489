"""The data that several files of this folder ask about."""

from pathlib import Path

import eval_data
import pytest


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eval_data.write_mirror(tmp_path_factory.mktemp("mirror"))
