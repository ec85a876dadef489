"""The benchmark of tensor-parallel steps, in its smallest form over gloo."""

import json
from pathlib import Path

import pytest
from benchmarks.train import tensor_parallel
from ranks import exit_codes

pytestmark = pytest.mark.lab

TINY = ["--shape", "tiny-dense", "--layers", "2", "--seq", "16", "--rounds", "2", "--steps", "1"]


def test_every_variant_is_timed_beside_its_bound_and_overlapped_sums_have_the_bits_of_blocking_ones(
    tmp_path: Path,
) -> None:
    out = tmp_path / "steps.json"
    codes, said = exit_codes(2, tensor_parallel.main, [*TINY, "--out", str(out)])
    assert codes == [0, 0], said
    found = json.loads(out.read_text())
    assert found["equal"] == {"standard": True, "ladder": True, "farskip": True}
    ways = ("blocking", "own-weights", "overlapped", "bound")
    names = [f"{wiring}, {way}" for wiring in found["equal"] for way in ways]
    assert list(found["variants"]) == names and all(len(one["ms"]) == 2 for one in found["variants"].values())
    assert "ladder, bound (wrong results)" in said and "of bound" in said


def test_a_degree_that_does_not_divide_the_ranks_ends_the_benchmark(tmp_path: Path) -> None:
    codes, said = exit_codes(2, tensor_parallel.main, [*TINY, "--tp", "4"])
    assert codes[0] == 2 and "a degree of 4 does not divide the 2 processes" in said
