"""Adding an architecture takes the steps that CONTRIBUTING says, and nothing else."""

import re

import pytest
import test_build
import test_wiring
import tiny

from fcsd.models import archs, build


@pytest.fixture
def newcomer(repo, monkeypatch):
    """The architecture of CONTRIBUTING's example, added as it says; its name."""
    section = (repo / "CONTRIBUTING.md").read_text().split("## Add an architecture")[1].split("\n## ")[0]
    assert len(re.findall(r"^\d\. ", section, re.MULTILINE)) <= 4
    row, config = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    arch = eval(row.strip(), vars(archs))
    monkeypatch.setattr(build, "ARCHS", {**archs.ARCHS, arch.model_type: arch})
    monkeypatch.setattr(tiny, "CONFIGS", {**tiny.CONFIGS, **eval("{" + config.strip() + "}")})
    assert arch.model_type not in archs.ARCHS and arch.model_type in tiny.CONFIGS
    return arch.model_type


def test_the_newcomer_passes_what_step_three_runs(newcomer, tmp_path):
    test_wiring.test_off_is_off(newcomer)
    for name, variant, layers in test_wiring.WIRINGS:
        test_wiring.test_on_is_the_table(newcomer, name, variant, layers)
    for wiring in test_wiring.SOME:
        test_wiring.test_cached_decoding_equals_the_full_forward(newcomer, wiring)
    test_wiring.test_generate(newcomer)
    test_wiring.test_gradient_checkpointing(newcomer)
    test_build.test_save_and_load_are_exact_under_the_original_names(newcomer, tmp_path)
