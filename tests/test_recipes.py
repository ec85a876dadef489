"""Every packaged recipe loads, says what it is for, and stays where it was found."""

from pathlib import Path

import pytest

from fcsd import recipes
from fcsd.config import load_recipe
from fcsd.distill.sweep_plan import all_trials
from fcsd.errors import ConfigError

NAMES = recipes.names()


def test_names_are_the_files(repo: Path) -> None:
    assert sorted(path.stem for path in (repo / "recipes").iterdir()) == NAMES
    assert {"tiny", "tiny-sft"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_loads_and_says_what_it_is_for(name: str) -> None:
    recipe = load_recipe(name).recipe
    assert recipe.name == name
    assert recipes.read(name).startswith("# ")
    assert "# Hardware: " in recipes.read(name)
    assert recipes.summary(name).endswith(".")


@pytest.mark.parametrize("name", [name for name in NAMES if load_recipe(name).recipe.sweep])
def test_every_trial_of_a_sweep_is_a_recipe(name: str) -> None:
    assert name.endswith("-sweep") and f"fcsd distill --sweep {name}" in recipes.read(name)
    assert len(all_trials(load_recipe(name))) > 1


@pytest.mark.parametrize("name", NAMES)
def test_bundled_files_a_recipe_names_exist(name: str, repo: Path) -> None:
    data = load_recipe(name).recipe.data
    paths = [source.path for source in [*data.sources, *([data.held_out] if data.held_out else [])]]
    assert all((repo / path).is_file() for path in paths if path.startswith("assets/"))


@pytest.mark.parametrize("name", NAMES)
def test_copy_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    written = recipes.copy(name, tmp_path)
    assert written == tmp_path / f"{name}.yaml"
    assert written.read_text(encoding="utf-8") == recipes.read(name)
    assert load_recipe(str(written)).recipe == load_recipe(name).recipe


def test_tiny_and_its_control_differ_in_the_objective_alone() -> None:
    kl, sft = (load_recipe(name).recipe.model_dump() for name in ("tiny", "tiny-sft"))
    assert {key for key in kl if kl[key] != sft[key]} == {"name", "output_dir", "objective"}


def test_unknown_name_suggests_the_closest() -> None:
    with pytest.raises(ConfigError) as caught:
        recipes.find("tinny")
    assert caught.value.hint is not None
    assert "did you mean 'tiny'?" in caught.value.hint


@pytest.mark.parametrize("name", ["../tiny", "", ".", "..", "\0"])
def test_a_name_never_leaves_the_folder(name: str) -> None:
    with pytest.raises(ConfigError):
        recipes.copy(name, Path("unused"))
