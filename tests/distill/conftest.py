"""What several files of this folder share."""

from pathlib import Path

import pytest
import runs


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``teacher`` and ``student``, its conversion; the runs of one test file write into it.

    A file names another architecture in ``ARCH``.
    """
    folder = tmp_path_factory.mktemp("models")
    runs.write_models(folder, getattr(request.module, "ARCH", "deepseek_v2"))
    return folder
