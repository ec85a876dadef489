"""The table of architectures agrees with transformers, and a family is named there alone."""

import ast
from dataclasses import replace
from inspect import signature, unwrap
from pathlib import Path

import pytest
import tiny
import transformers

from fcsd.errors import BadInputError
from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, experts_of
from fcsd.models.config_keys import cache_keyword

# The only other files of the package with a row's ``model_type`` in quotes, and why.
NAMED_ELSEWHERE = {
    "models/products.py": "the names under which people know the families, for messages",
}


def named(text: str) -> set[str]:
    """The types of rows that a Python text has in quotes, converted ones included."""
    quoted = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    return {str(value).removeprefix("fcsd_") for value in quoted} & ARCHS.keys()


def test_no_family_is_named_outside_of_the_table(repo: Path) -> None:
    package = repo / "fcsd"
    files = {path.relative_to(package).as_posix(): named(path.read_text()) for path in package.rglob("*.py")}
    assert files.pop("models/archs.py") == ARCHS.keys()
    assert {name: found for name, found in files.items() if found and name not in NAMED_ELSEWHERE} == {}


def test_a_named_family_is_found() -> None:
    text = 'if x in ("olmoe", "other") or y == "fcsd_gpt_oss" or z.endswith("llama4"):\n    "a llama"\n'
    assert named(text) == {"olmoe", "gpt_oss", "llama4"}


def test_the_cache_has_the_name_that_transformers_gives_it() -> None:
    assert cache_keyword() in signature(unwrap(transformers.LlamaModel.forward)).parameters


def test_every_row_has_a_tiny_model() -> None:
    supported = {arch for arch, row in ARCHS.items() if row.unsupported() is None}
    assert tiny.CONFIGS.keys() | {"llama4"} == supported, "llama4's is tiny.llama4_vision"


def test_a_type_that_this_transformers_is_too_old_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.config("llama")
    monkeypatch.setitem(ARCHS, "llama", replace(ARCHS["llama"], since=(99, 1)))  # pyright: ignore
    with pytest.raises(BadInputError, match=r"llama needs transformers 99\.1 or later"):
        arch_of(config)


@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_a_row_describes_its_config(arch: str) -> None:
    row, config = ARCHS[arch], tiny.config(arch)
    assert row.config == type(config).__name__ and config.model_type == row.model_type == arch
    assert row.dense == (experts_of(config) == 0), "a family with experts has autoep or no_ep"
    assert row.text_config is None or row.text_config in config.sub_configs
    assert all(hasattr(transformers, name) for name, _ in row.classes.values())
    assert row.autoep is None or row.no_ep is None
