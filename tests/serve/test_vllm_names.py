"""Every name of vLLM that the plugin uses exists in the versions that it supports, by a list of their names."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fcsd.serve.vllm.support import why_unsupported

VERSIONS = json.loads((Path(__file__).parent / "vllm_names.json").read_text())


@pytest.fixture(scope="module")
def script(repo: Path) -> Any:
    spec = importlib.util.spec_from_file_location("vllm_names", repo / "benchmarks/vllm/vllm_names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", VERSIONS)
def test_names_exist(version: str, script: Any) -> None:
    assert why_unsupported(version) is None
    listed = set()
    for owner, names in VERSIONS[version].items():
        module = owner.startswith("vllm")
        listed |= {f"{owner}{':' if module else '.'}{name}" for name in names.split()} | (set() if module else {owner})
    assert not script.used() - listed, "see benchmarks/vllm/vllm_names.py"


def test_every_supported_minor_version_is_listed() -> None:
    assert [version.rsplit(".", 1)[0] for version in VERSIONS] == ["0.24", "0.25", "0.26", "0.27", "0.28"]


def test_a_name_that_is_gone_is_found(script: Any, tmp_path: Path) -> None:
    source = tmp_path / "vllm/model_executor/models"
    source.mkdir(parents=True)
    (source / "registry.py").write_text('{"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}')
    (source / "llama.py").write_text("self.mlp = 1\n")
    assert script.listed(tmp_path) == {"LlamaForCausalLM": "mlp", "vllm": "__version__"}
