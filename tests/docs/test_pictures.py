"""The picture of the wirings: what it shows follows from the table that the models use."""

import importlib.util
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def drawing(repo: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_wiring", repo / "docs/draw_wiring.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gpus_wait_under_the_standard_wiring_alone(drawing: ModuleType) -> None:
    def waits(bars: list[tuple[str, str, float, float]]) -> float:
        compute = [(start, start + length) for row, _, start, length in bars if row == "compute"]
        return sum(after[0] - before[1] for before, after in pairwise(compute))

    assert waits(drawing.shards("standard")) > 0 and waits(drawing.shards("ladder")) == pytest.approx(0)
    assert waits(drawing.experts("standard")) > waits(drawing.experts("parallel")) > 0
    assert waits(drawing.experts("farskip")) == pytest.approx(0)
