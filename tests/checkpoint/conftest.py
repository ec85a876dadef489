"""The good checkpoint that the tests of this folder spoil, and the hub that they reach."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import hub_server
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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[hub_server.Hub]:
    """A hub on localhost, to which the real client is connected."""
    with hub_server.running() as hub:
        hub_server.connect(hub, monkeypatch, tmp_path / "cache")
        yield hub
