"""Runs that start solved, and runs that convert their layers progressively: what they compute, and how they resume."""

from pathlib import Path
from typing import Any

import pytest
import runs

from fcsd.config import ResolvedRecipe
from fcsd.distill.preview import preview
from fcsd.distill.run.report import read_metrics
from fcsd.distill.solved_start import calibration_rows
from fcsd.distill.step.one_step import groups_converted
from fcsd.errors import ConfigError

STAGED: dict[str, Any] = {"train__progressive_share": 0.5, "train__progressive_order": [1, "0,2", 3]}
SOLVED: dict[str, Any] = {"init__solve": "linear", "init__solve_tokens": 256}


def test_runs_start_as_they_say_and_resume_with_the_same_bits(folder: Path) -> None:
    def recipe(name: str, steps: int, **changes: Any) -> ResolvedRecipe:
        return runs.resolved(folder, output_dir=str(folder / name), train__steps=steps, optim__horizon=4, **changes)

    solved = [recipe("solved", 2, **SOLVED), recipe("solved-parts", 1, **SOLVED), recipe("solved-parts", 2, **SOLVED)]
    staged = [recipe("staged", 3, **STAGED), recipe("staged-parts", 1, **STAGED), recipe("staged-parts", 3, **STAGED)]
    runs.train_all([recipe("plain", 1), *solved, *staged])
    first = {name: read_metrics(folder / name)[0] for name in ("plain", "solved", "staged")}
    assert first["solved"]["kl"] < first["plain"]["kl"]
    assert 1e-6 < first["staged"]["kl"] < first["plain"]["kl"]  # one layer of four is converted
    assert [record["converted"] for record in read_metrics(folder / "staged")] == [1, 2, 3]
    for name in ("solved", "staged"):
        assert runs.outcome(folder / f"{name}-parts") == runs.outcome(folder / name)
        assert (folder / name / "final/config.json").read_text() == (folder / "student/config.json").read_text()
    runs.train(recipe("ranks", 1, **SOLVED), 2)
    (two,) = read_metrics(folder / "ranks")
    assert two["kl"] == pytest.approx(first["solved"]["kl"], rel=1e-4)  # each process computed half of the sums


def test_all_groups_are_converted_after_the_share() -> None:
    recipe = runs.load_recipe("tiny", ["train.steps=20", "optim.horizon=100", "train.progressive_share=0.1"]).recipe
    assert [groups_converted(recipe, step, 3) for step in range(1, 13)] == [1] * 5 + [2] * 5 + [3] * 2
    assert groups_converted(recipe, 1, 1) == 1
    assert groups_converted(runs.load_recipe("tiny", []).recipe, 1, 7) == 7


def test_a_dry_run_shows_both(folder: Path) -> None:
    shown = preview(runs.resolved(folder, **STAGED).recipe)
    assert "converted in the order 1; 0,2; 3, all of them from step 3 on" in shown
    recipe = runs.resolved(folder, init__solve="norms").recipe
    assert "norms, on the first 1,024 tokens" in preview(recipe)  # the whole schedule has no more
    assert calibration_rows(runs.resolved(folder, **SOLVED).recipe) == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train__progressive_share": 0.1, "parallel__ep_size": 2}, "progressive_share needs parallel.ep_size 1"),
        ({"train__progressive_order": [1]}, "so it has no effect"),
        ({"train__progressive_share": 0.1, "train__anneal_share": 0.1}, "cannot be combined"),
        ({"init__solve": "norms", "parallel__ep_size": 2}, "init.solve needs parallel.ep_size 1"),
        ({"init__solve": "norms", "train__anneal_share": 0.1}, "training begins with the original"),
        ({"init__solve": "norms", "train__progressive_share": 0.1}, "training begins with the original"),
        ({"init": {"solve": "norms", "weights": "random"}}, "random weights have no original"),
    ],
)
def test_what_does_not_go_together_is_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        runs.resolved(folder, **changes)


def test_a_model_that_cannot_is_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    original = str(folder / "teacher")
    with pytest.raises(ConfigError, match="no rewired layer"):
        preview(runs.resolved(folder, model=original, teacher=original, train__progressive_share=0.1).recipe)
    with pytest.raises(ConfigError, match=r"no rewired layer, so init\.solve has no effect"):
        preview(runs.resolved(folder, model=original, teacher=original, init__solve="norms").recipe)
    with pytest.raises(ConfigError, match="names the layers 0-1, but"):
        preview(runs.resolved(folder, train__progressive_share=0.1, train__progressive_order=["0-1"]).recipe)
    runs.write_models(tmp_path, "llama")
    changes: dict[str, Any] = {"init": {"wiring": "desync-2x", "tp_degree": 2, "solve": "norms"}}
    with pytest.raises(ConfigError, match=r"init\.solve cannot correct the wiring desync-2x"):
        preview(runs.resolved(tmp_path, model=str(tmp_path / "teacher"), **changes).recipe)
