"""The benchmark of steps in which converted layers alone train, in its smallest form over gloo."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks.train import converted_layers
from ranks import exit_codes

pytestmark = pytest.mark.lab
TINY = ["--shape", "tiny-dense", "--layers", "4", "--seq", "32", "--rows", "2", "--rounds", "2", "--steps", "1"]


def measure(words: list[str]) -> None:
    sys.argv[1:] = words
    converted_layers.main()


def test_every_way_is_timed_in_turns_beside_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    codes, said = exit_codes(2, measure, [str(out), *TINY])
    assert codes == [0, 0], said
    found = json.loads(out.read_text())
    assert list(found["ways"]) == converted_layers.WAYS and found["plan_gib"] > 0
    assert all(len(way["ms"]) == 2 for way in found["ways"].values())
