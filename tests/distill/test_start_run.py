"""Runs that convert their layers progressively: what they compute, and how they resume."""

from pathlib import Path
from typing import Any

import pytest
import runs

from fcsd.config import ResolvedRecipe
from fcsd.distill.preview import preview
from fcsd.distill.run.report import read_metrics
from fcsd.distill.step.one_step import groups_converted
from fcsd.errors import ConfigError

STAGED: dict[str, Any] = {"train__progressive_share": 0.5, "train__progressive_order": [1, "0,2", 3]}


def test_runs_start_as_they_say_and_resume_with_the_same_bits(folder: Path) -> None:
    def recipe(name: str, steps: int, **changes: Any) -> ResolvedRecipe:
        return runs.resolved(folder, output_dir=str(folder / name), train__steps=steps, optim__horizon=4, **changes)

    staged = [recipe("staged", 3, **STAGED), recipe("staged-parts", 1, **STAGED), recipe("staged-parts", 3, **STAGED)]
    runs.train_all([recipe("plain", 1), *staged])
    first = {name: read_metrics(folder / name)[0] for name in ("plain", "staged")}
    assert 1e-6 < first["staged"]["kl"] < first["plain"]["kl"]  # one layer of four is converted
    assert [record["converted"] for record in read_metrics(folder / "staged")] == [1, 2, 3]
    assert runs.outcome(folder / "staged-parts") == runs.outcome(folder / "staged")
    assert (folder / "staged/final/config.json").read_text() == (folder / "student/config.json").read_text()


def test_all_groups_are_converted_after_the_share() -> None:
    recipe = runs.load_recipe("tiny", ["train.steps=20", "optim.horizon=100", "train.progressive_share=0.1"]).recipe
    assert [groups_converted(recipe, step, 3) for step in range(1, 13)] == [1] * 5 + [2] * 5 + [3] * 2
    assert groups_converted(recipe, 1, 1) == 1
    assert groups_converted(runs.load_recipe("tiny", []).recipe, 1, 7) == 7


def test_a_dry_run_shows_the_order(folder: Path) -> None:
    shown = preview(runs.resolved(folder, **STAGED).recipe)
    assert "converted in the order 1; 0,2; 3, all of them from step 3 on" in shown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train__progressive_share": 0.1, "parallel__ep_size": 2}, "progressive_share needs parallel.ep_size 1"),
        ({"train__progressive_order": [1]}, "so it has no effect"),
        ({"train__progressive_share": 0.1, "train__anneal_share": 0.1}, "cannot be combined"),
    ],
)
def test_what_does_not_go_together_is_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        runs.resolved(folder, **changes)


def test_a_model_that_cannot_is_refused_before_anything_is_written(folder: Path) -> None:
    original = str(folder / "teacher")
    with pytest.raises(ConfigError, match="no rewired layer"):
        preview(runs.resolved(folder, model=original, teacher=original, train__progressive_share=0.1).recipe)
    with pytest.raises(ConfigError, match="names the layers 0-1, but"):
        preview(runs.resolved(folder, train__progressive_share=0.1, train__progressive_order=["0-1"]).recipe)
