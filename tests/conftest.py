"""Makes every test run offline, on one thread, with caches that are deleted at the end of the session."""

import gc
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_STARTS_PROCESSES = ("ranks", "runs", "reloads", "subprocess")  # modules: a test that imports one takes seconds
_CACHE = tempfile.TemporaryDirectory(prefix="fcsd-tests-")
# These variables are set before anything imports torch, transformers or datasets, which read them once.
os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HOME=f"{_CACHE.name}/hf",
    HF_DATASETS_CACHE=f"{_CACHE.name}/datasets",
    HF_MODULES_CACHE=f"{_CACHE.name}/modules",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    MPLBACKEND="Agg",
)
if not Path("/dev/nvidiactl").exists():  # Without a GPU, Triton kernels run in its interpreter.
    os.environ.update(TRITON_INTERPRET="1", DS_ACCELERATOR="cpu")
# No test outlives a power cut, and a disk takes milliseconds to say that it has written. Real commands wait for it.
os.fsync = lambda descriptor: None
# No test depends on speed, and the cores of a machine are shared.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for a test that reads a mirror without fcsd: data sets of two mirrors have the same names."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets cache")
    return tmp_path / "datasets cache"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes come first, then those with most tests.

    A worker takes a whole file at a time. The last ones are short, so that all workers end together.
    """
    files = Counter(item.path for item in items)
    starts = {
        item.path: not vars(item.getparent(pytest.Module).obj).keys().isdisjoint(_STARTS_PROCESSES) for item in items
    }
    items.sort(key=lambda item: (not starts[item.path], -files[item.path], str(item.path)))


def pytest_collection_finish() -> None:
    """The collector need not visit what all tests share: the imported modules and the tests themselves."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", type=Path, default=None, help="directory with the real HumanEvalPlus and MbppPlus")


@pytest.fixture
def data_dir(request: pytest.FixtureRequest) -> Path | None:
    """The directory of the real code benchmarks; None if the caller does not have them."""
    return request.config.getoption("--data")
