"""Ways take turns, and each has the quartiles of its own time."""

import pytest
import torch
from benchmarks.turns import timings

pytestmark = pytest.mark.lab


def test_ways_take_turns_also_in_a_process_without_a_group() -> None:
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) for name in ("one", "other")}
    found = timings(ways, torch.device("cpu"), 3, before=lambda: order.append("before"))
    assert order == ["before", "one", "before", "other"] * 5  # two repeats are not counted
    assert list(found) == ["one", "other"]
    assert all(0 <= each.low <= each.median <= each.high for each in found.values())
