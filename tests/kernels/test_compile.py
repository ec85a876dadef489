"""Every Triton kernel compiles for an H100 or H200, and for an MI300X. Nothing is launched."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _compiled(tmp_path: Path, *target: str) -> set[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("compiled.py")), *target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


def _kernels() -> set[str]:
    """The names of all kernels in the source. By convention the name of a kernel ends with ``_kernel``."""
    return {
        name
        for path in (ROOT / "fcsd").rglob("*.py")
        for name in re.findall(r"^@triton\.jit.*\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """For its first call; most of the time goes into further formats, types and widths of the same code."""
    assert _compiled(tmp_path, "cuda", "90", "32", "once") == _kernels()


@pytest.mark.nightly
def test_every_call_of_a_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    assert _compiled(tmp_path, "cuda", "90", "32") == _kernels()


@pytest.mark.nightly
def test_every_kernel_compiles_for_an_mi300x(tmp_path: Path) -> None:
    assert _compiled(tmp_path, "hip", "gfx942", "64") == _kernels()
