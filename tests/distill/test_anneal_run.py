"""A run with an annealed wiring: its first step trains the original, and a resumed run takes the same steps."""

from pathlib import Path

import pytest
import runs

from fcsd.distill import loop
from fcsd.distill.preview import preview
from fcsd.distill.run.report import read_metrics
from fcsd.distill.step.one_step import anneal_weight
from fcsd.errors import ConfigError


def test_the_weight_rises_over_its_share_of_the_schedule() -> None:
    recipe = runs.load_recipe("tiny", ["train.steps=20", "optim.horizon=100", "train.anneal_share=0.1"]).recipe
    weights = [anneal_weight(recipe, step) for step in range(1, 21)]
    assert weights == [*(n / 10 for n in range(10)), *[1.0] * 10]
    assert anneal_weight(runs.load_recipe("tiny", []).recipe, 1) == 1


def test_a_run_begins_with_the_original_and_resumes_with_the_same_bits(folder: Path) -> None:
    options = {"train__anneal_share": 0.5, "train__activation_checkpointing": True, "optim__horizon": 4}
    whole = runs.resolved(folder, output_dir=str(folder / "whole"), **options)
    parts = [
        runs.resolved(folder, output_dir=str(folder / "parts"), train__steps=steps, train__log_every=1, **options)
        for steps in (2, 4)
    ]
    runs.train_all([whole, *parts])
    metrics = read_metrics(folder / "whole")
    assert [record["anneal"] for record in metrics] == [0, 0.5, 1, 1]
    assert metrics[0]["kl"] < 1e-6 < metrics[2]["kl"]  # the teacher is the original
    assert runs.outcome(folder / "parts") == runs.outcome(folder / "whole")
    assert (folder / "whole/final/config.json").read_text() == (folder / "student/config.json").read_text()


def test_where_nothing_can_be_annealed_the_run_is_refused(folder: Path) -> None:
    recipe = runs.resolved(
        folder, model=str(folder / "teacher"), teacher=str(folder / "teacher"), train__anneal_share=0.1
    )
    with pytest.raises(ConfigError, match="no rewired layer"):
        loop.distill_model(recipe, dry_run=True)
    shown = preview(runs.resolved(folder, train__anneal_share=0.5).recipe)
    assert "the student's own from step 3 on" in shown
