"""Adding an architecture takes the steps that docs/adding_an_architecture.md says, and nothing else."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import test_build
import test_norms
import test_rotary
import test_wiring
import tiny

from fcsd.models.archs import ARCHS, Arch, _row

PAGE = "docs/adding_an_architecture.md"


@pytest.fixture
def blocks(repo: Path) -> list[str]:
    """The page's blocks of Python: the easy row, its tiny config, the hard row."""
    found = re.findall(r"```python\n(.*?)```", (repo / PAGE).read_text(), re.DOTALL)
    assert len(found) == 3
    return found


@pytest.fixture
def newcomer(blocks: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's easy family, added in the two files that it names; its name."""
    row, (config,) = eval(blocks[0].strip(), {"_row": _row}), eval("{" + blocks[1].strip() + "}").items()
    assert config[0] == row.model_type
    for table, key, value in ((ARCHS, row.model_type, row), (tiny.CONFIGS, *config)):
        assert table.get(key, value) == value, "the page says what the table says"
        monkeypatch.setitem(table, key, value)  # pyright: ignore[reportArgumentType]
    return row.model_type


def load(path: Path) -> ModuleType:
    """A module of tests in another folder, or a script."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_newcomer_passes_what_step_three_runs(newcomer: str, tmp_path: Path, repo: Path) -> None:
    test_wiring.test_off_is_off(newcomer)
    for name, variant, layers in test_wiring.WIRINGS:
        test_wiring.test_on_is_the_table(newcomer, name, variant, layers)
    for wiring in test_wiring.SOME:
        test_wiring.test_cached_decoding_equals_the_full_forward(newcomer, wiring)
    test_wiring.test_generate(newcomer)
    test_wiring.test_gradient_checkpointing(newcomer)
    test_build.test_save_and_load_are_exact_under_the_original_names(newcomer, tmp_path / "saved")
    test_norms.test_a_model_with_fused_norms_computes_the_same_and_becomes_itself_again(newcomer)
    test_rotary.test_a_model_with_fused_rotations_computes_the_same_and_becomes_itself_again(newcomer)
    load(repo / "tests/models/test_archs.py").test_a_row_describes_its_config(newcomer)
    load(repo / "tests/parallel/all_reduce/test_tp_plan.py").test_every_tensor_of_a_layer_has_a_style(newcomer)
    (tmp_path / "inspected").mkdir()
    load(repo / "tests/checkpoint/test_checkpoint_inspect.py").test_every_architecture(newcomer, tmp_path / "inspected")


def test_vllm_has_the_newcomer_and_the_readme_would_list_it(newcomer: str, repo: Path) -> None:
    names, script = load(repo / "tests/serve/test_vllm_names.py"), load(repo / "scripts/vllm_names.py")
    assert ARCHS[newcomer].causal_lm in script.used()
    for version in names.VERSIONS:
        names.test_names_exist(version, script)
    reference = load(repo / "scripts/write_reference.py")
    assert f"`{newcomer}`" in reference.with_architectures((repo / "README.md").read_text())


def test_a_forgotten_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a default row, the hard family does not pass: the kernel would rotate by other angles."""
    monkeypatch.setitem(ARCHS, "gpt_oss", _row("gpt_oss", "GptOss"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(AssertionError):
        test_rotary.test_a_model_with_fused_rotations_computes_the_same_and_becomes_itself_again("gpt_oss")


def test_the_hard_row_is_that_of_the_table_and_every_field_is_explained(blocks: list[str], repo: Path) -> None:
    from fcsd.models import archs

    row = eval(blocks[2].strip(), vars(archs))
    assert row == ARCHS[row.model_type]
    page = (repo / PAGE).read_text()
    assert [field.name for field in fields(Arch) if f"`{field.name}`" not in page and field.name != "model_type"] == []
    assert len(re.findall(r"^\d\. ", page, re.MULTILINE)) <= 4
