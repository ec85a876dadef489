"""``python -m benchmarks.unquoted``: which raw results nothing names."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.unquoted import unquoted

pytestmark = pytest.mark.lab


def test_a_file_is_named_by_its_name_its_stem_or_a_pattern() -> None:
    files = [f"results/{name}.json" for name in ("kl_h200", "serve_8b_slow_2xh100", "left_over", "step_1", "step_12")]
    texts = ["([raw](kl_h200.json))", 'glob(f"serve_{name}slow_?xh100.json")', 'read("step_1")', "*.json {name}.json"]
    assert unquoted(files, texts) == ["results/left_over.json", "results/step_12.json"]


def test_everything_in_this_checkout_is_named(repo: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.unquoted"], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
