"""Every name of vLLM that the plugin uses exists in the versions that were read, by a list of their names."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from benchmarks.vllm import names as script

from fcsd.serve.vllm.support import TOO_NEW, version_of, why_unsupported

VERSIONS = json.loads((Path(__file__).parent / "vllm_names.json").read_text())


@pytest.mark.parametrize("version", VERSIONS)
def test_names_exist(version: str) -> None:
    listed = set()
    for owner, names in VERSIONS[version].items():
        module = owner.startswith("vllm")
        listed |= {f"{owner}{':' if module else '.'}{name}" for name in names.split()} | (set() if module else {owner})
    assert not script.used_in(version) - listed, "see python -m benchmarks.vllm names"


def test_every_supported_minor_version_is_listed() -> None:
    minor = [version_of(version)[1] for version in VERSIONS]
    assert minor == list(range(24, 34))
    assert [n for n in range(20, 40) if why_unsupported(f"0.{n}.0") is None] == [n for n in minor if n < TOO_NEW[1]]


def test_what_the_plugin_no_longer_uses_is_gone_by_then() -> None:
    """A name that is still there would mean that the plugin leaves it out for nothing."""
    for name, first in script.UNTIL.items():
        owner, _, inner = name.partition(":")
        have = [version for version, names in VERSIONS.items() if inner in names.get(owner, "").split()]
        assert {version_of(version) < first for version in have} == {True}
        assert not any(name in script.used_in(version) for version in VERSIONS if version not in have)


def test_the_next_version_is_judged_by_its_sources_or_its_wheel(tmp_path: Path, repo: Path) -> None:
    source = tmp_path / "vllm/distributed"
    source.mkdir(parents=True)
    text = "def _all_reduce_out_place(self, renamed): ...\n_groups = unique_name = 1\n"
    (source / "parallel_state.py").write_text(text)
    found = script.breaks("0.99.0", tmp_path)
    assert "vllm.distributed.parallel_state:_all_reduce_out_place(self,input_" in found
    assert not [name for name in found if name.endswith((":_groups", ":unique_name", ":_all_reduce_out_place"))]
    assert not [name for name in found if name in script.UNTIL or name.startswith("ArceeForCausalLM")]
    wheel = tmp_path / "vllm-0.99.0-cp38-abi3-manylinux_2_31_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/distributed/parallel_state.py", text)
    ran = breaks(repo, wheel)
    assert ran.returncode == 1 and ran.stdout.splitlines() == [f"0.99.0: {name}" for name in found]


def breaks(repo: Path, wheel: Path) -> subprocess.CompletedProcess[str]:
    """What the program says of a wheel."""
    command = [sys.executable, "-m", "benchmarks.vllm", "names", "breaks", str(wheel)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(repo)})


@pytest.mark.nightly
def test_the_newest_version_has_every_name(repo: Path, tmp_path: Path) -> None:
    """It downloads some hundred megabytes, and its failure says what the plugin would miss."""
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options, "vllm"], check=True)
    (wheel,) = tmp_path.glob("vllm-*.whl")
    ran = breaks(repo, wheel)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    source = tmp_path / "vllm/model_executor/models"
    source.mkdir(parents=True)
    (source / "registry.py").write_text('{"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}')
    (source / "llama.py").write_text("self.mlp = 1\n")
    assert script.listed(tmp_path) == {"LlamaForCausalLM": "mlp", "vllm": "__version__"}
