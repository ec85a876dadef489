"""The good checkpoint that the tests of this folder spoil."""

import shutil
from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good sharded checkpoint, which no test changes."""
    path = tmp_path_factory.mktemp("good") / "model"
    tiny.model("qwen3_moe").save_pretrained(path, max_shard_size="300KB")
    return path


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """A copy of the good checkpoint, to be spoilt."""
    return Path(shutil.copytree(good, tmp_path / "model"))
