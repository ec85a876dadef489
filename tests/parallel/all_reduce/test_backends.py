"""The table of all-reduce backends: who may choose which, and which gives wrong results."""

from pathlib import Path

import pytest

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.parallel.all_reduce.backends import BACKENDS, backend_of, described, is_bound, names, require_right


def test_each_user_has_names_of_its_own() -> None:
    assert names("engine") == ["nccl", "symmetric", "auto", "host", "host:FORMAT", "quantised:FORMAT", "none"]
    assert names("plugin") == ["symmetric", "auto", "vllm", "quantised:FORMAT", "none"]
    for name, user in (("vllm", "engine"), ("nccl", "plugin"), ("quick", "engine"), ("quantised:FORMAT", "engine")):
        with pytest.raises(ConfigError):
            backend_of(name, user)
    with pytest.raises(ConfigError, match="unknown all-reduce backend 'quick'; one of nccl, symmetric, auto"):
        require_right("quick")


def test_the_bound_alone_has_wrong_results() -> None:
    assert [row.name for row in BACKENDS if row.bound] == ["none"]
    assert is_bound("none") and is_bound("none", "plugin") and not is_bound("quantised:int4:g32")
    assert "none" not in described("engine")
    require_right("quantised:int4:g32")
    with pytest.raises(ConfigError, match="the all-reduce backend none gives wrong results"):
        require_right("none")


def test_a_quantised_backend_has_its_format() -> None:
    backend, format = backend_of("quantised:int5:g32", "plugin")
    assert backend.name == "quantised:FORMAT" and format == Format(5, 32)
    backend, format = backend_of("host:int8", "engine")
    assert backend.name == "host:FORMAT" and format == Format(8) and backend_of("host", "engine")[1] is None
    assert backend_of("auto", "plugin")[1] is None and backend_of("auto", "plugin")[0].by_vllm


def test_the_page_of_the_engine_lists_its_backends(repo: Path) -> None:
    rows = [line.split("`")[1] for line in (repo / "docs/engine.md").read_text().splitlines() if line.startswith("| `")]
    assert set(names("engine")) <= set(rows)
