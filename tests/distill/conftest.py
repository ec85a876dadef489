"""What several files of this folder share."""

from pathlib import Path

import pytest
import runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``teacher`` and ``student``, its conversion; the runs of one test file write into it."""
    folder = tmp_path_factory.mktemp("models")
    runs.write_models(folder)
    return folder
