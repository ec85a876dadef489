"""The benchmark of training steps runs on CPUs as it does on GPUs, and its ceilings follow from cover and wire."""

import json
import os
import subprocess
import sys

import pytest

from fcsd.bench.ceilings import Window, ceiling


def test_a_ceiling_counts_what_fits_under_the_cover():
    windows = [
        Window("dispatch", "fwd", 0, cover=2.0, wire=1.0),  # hidden whole
        Window("combine", "fwd", 0, cover=0.5, wire=1.0),  # by half
        Window("dispatch", "fwd", 1, cover=2.0, wire=1.0),
        Window("combine", "fwd", 1, cover=0.0, wire=1.0),  # nothing follows it
        Window("combine", "bwd", 1, cover=0.0, wire=4.0),
    ]
    assert ceiling(windows, "fwd") == 2.5 / 4
    assert ceiling(windows, "fwd", without_last=True) == 2.5 / 3
    assert ceiling(windows, "bwd") == 0.0


@pytest.mark.parametrize("router", ["initialised", "uniform"])
def test_all_variants_are_timed_on_two_ranks(tmp_path, router):
    command = [sys.executable, "-m", "fcsd", "bench", "train", "tiny", "--layers", "2", "--micro-batch", "1"]
    command += ["--seq", "16", "--rounds", "1", "--steps", "2", "--gpus", "2", "--router", router]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "train.json").read_text())
    assert result["difference"] == 0.0  # gloo adds in a fixed order
    assert {len(found["step"]) for found in result["variants"].values()} == {2}
    calls = {(window["kind"], window["passes"], window["layer"]) for window in result["windows"]}
    assert calls == {(kind, passes, k) for kind in ("dispatch", "combine") for passes in ("fwd", "bwd") for k in (0, 1)}
