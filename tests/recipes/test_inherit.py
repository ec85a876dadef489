"""A recipe on top of another: what it takes over, where each value comes from, and what is refused."""

from pathlib import Path

import pytest

from fcsd.config import load_recipe
from fcsd.errors import ConfigError


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_sections_are_merged_and_lists_replaced(tmp_path: Path) -> None:
    below = write(
        tmp_path / "below.yaml",
        "name: below\nmodel: converted\noutput_dir: runs/x\n"
        "data:\n  sources:\n    - path: a\n      weight: 2\n    - path: b\n  seq_len: 64\n"
        "optim:\n  lr: 1e-3\ntrain:\n  batch_tokens: 1024\n",
    )
    middle = write(tmp_path / "middle.yaml", f"base: {below}\ndata:\n  sources:\n    - path: c\noptim:\n  lr: 1e-4\n")
    top = write(tmp_path / "top.yaml", f"base: {middle}\nname: top\n\nobjective:\n  kl: 2\n")
    resolved = load_recipe(top, ["train.steps=50"])
    recipe, origins = resolved.recipe, resolved.origins
    assert (recipe.name, recipe.model, recipe.objective.kl) == ("top", "converted", 2)
    assert (recipe.optim.lr, recipe.train.batch_tokens, recipe.train.steps) == (1e-4, 1024, 50)
    assert [(source.path, source.weight) for source in recipe.data.sources] == [("c", 1.0)]
    assert recipe.data.seq_len == 64
    assert origins["name"] == "recipe:2" and origins["objective.kl"] == "recipe:5"
    assert origins["optim.lr"] == "middle.yaml:6" and origins["data.sources.0.path"] == "middle.yaml:4"
    assert origins["model"] == "below.yaml:2" and origins["data.seq_len"] == "below.yaml:9"
    assert origins["data.sources.0.weight"] == "default" and origins["train.steps"] == "--set"
    resolved_file = write(tmp_path / "resolved.yaml", resolved.to_yaml())
    assert load_recipe(resolved_file).recipe == recipe, "the resolved recipe needs its bases no more"


def test_a_mistake_is_shown_where_it_was_made(tmp_path: Path) -> None:
    below = write(tmp_path / "below.yaml", "name: x\nmodel: m\noutput_dir: o\ndata: {sources: [{path: a}]}\nsede: 1\n")
    with pytest.raises(ConfigError, match=r"below\.yaml:5: unknown key 'sede'; did you mean 'seed'"):
        load_recipe(write(tmp_path / "top.yaml", f"base: {below}\nname: top\n"))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("tinny", "no packaged recipe is named 'tinny'"),
        ("./missing.yaml", "missing.yaml: no such file"),
        ("[tiny]", "top.yaml:1: base: should be the name of a recipe"),
    ],
)
def test_a_base_that_is_none(tmp_path: Path, base: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(tmp_path / "top.yaml", f"base: {base}\n"))


def test_a_circle_is_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    write(one, f"base: {two}\n")
    write(two, f"base: {one}\n")
    for path in (one, two):
        with pytest.raises(ConfigError, match="is based on this recipe"):
            load_recipe(path)
