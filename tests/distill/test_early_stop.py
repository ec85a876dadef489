"""Stopping early: at the exact patience and delta, over kills and resumes, and without a trace in the weights."""

import hashlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs

from fcsd.config import EarlyStop, ResolvedRecipe, load_recipe
from fcsd.distill import loop
from fcsd.distill.early_stop import ScoreHistory, judge
from fcsd.distill.run import checkpoints, manifest
from fcsd.distill.run.report import read_metrics
from fcsd.errors import CheckpointError, ConfigError
from fcsd.eval.score import Score, Scorer
from fcsd.export.final import _choose

SCRIPT = [0.50, 0.51, 0.60, 0.61, 0.59, 0.612, 0.2, 0.7]  # of steps 1, 2, ...
STOPPING = {"metric": "scripted", "every": 1, "patience": 3, "delta": 0.02}


def history(values: list[float]) -> list[dict[str, Any]]:
    return [{"step": 10 * n, "value": value} for n, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("values", "changes", "best", "waited"),
    [
        ([], {}, None, 0),
        ([0.5], {}, 10, 0),
        ([0.50, 0.51], {}, 20, 1),  # better by exactly 2 % is not better by more
        ([0.50, 0.5101], {}, 20, 0),
        ([0.50, 0.51, 0.511], {}, 30, 0),  # small steps add up against the last improvement
        ([0.50, 0.60, 0.60, 0.59], {}, 30, 2),  # of equal scores, the latest
        ([0.50, 0.515], {"delta_kind": "absolute"}, 20, 1),
        ([0.50, 0.525], {"delta_kind": "absolute"}, 20, 0),
        ([0.0, 0.001], {}, 20, 0),
        ([0.0, 0.0], {"delta": 0.0}, 20, 1),
    ],
)
def test_what_counts_as_better(values: list[float], changes: dict[str, Any], best: int | None, waited: int) -> None:
    verdict = judge(history(values), EarlyStop(metric="x", patience=2, **changes), "max")
    assert (verdict.best, verdict.waited, verdict.stop) == (best, waited, waited >= 2)


def test_a_score_that_is_not_finite_is_never_the_best() -> None:
    nan, inf = float("nan"), float("inf")
    for mode, values in (("min", [nan, 1.0, 0.9, 0.8]), ("max", [nan, 0.8, 0.9, 1.0]), ("max", [inf, 0.8, 0.9, 1.0])):
        verdict = judge(history(values), EarlyStop(metric="x", patience=2), mode)
        assert (verdict.best, verdict.waited, verdict.stop) == (40, 0, False)
    verdict = judge(history([0.9, nan, nan]), EarlyStop(metric="x", patience=2), "min")
    assert (verdict.best, verdict.waited, verdict.stop) == (10, 2, True)
    assert judge(history([nan]), EarlyStop(metric="x", patience=2), "min").best is None


def test_a_loss_is_better_when_it_is_smaller() -> None:
    verdict = judge(history([2.0, 1.97, 1.9, 1.95]), EarlyStop(metric="held_out"), "min")
    assert (verdict.best, verdict.waited) == (30, 1)


def test_scores_of_other_questions_are_not_compared() -> None:
    settings = EarlyStop(metric="mbpp_plus", patience=2)
    made = {name: Scorer(lambda *_: Score(0.5, 0.1, 9), questions=name) for name in ("a", "b")}
    begun = ScoreHistory(settings, made["a"], {})
    assert begun.progress() == {"scores": [], "best": None, "scored_questions": "a"}
    ScoreHistory(settings, made["b"], begun.progress())  # no score is compared yet
    scored = {**begun.progress(), "scores": history([0.5])}
    assert ScoreHistory(settings, made["a"], scored).progress() == scored | {"best": 10}
    with pytest.raises(CheckpointError, match="asks other questions than it did before") as caught:
        ScoreHistory(settings, made["b"], scored)
    assert "early_stop.data_mirror" in str(caught.value.hint)
    del scored["scored_questions"]  # an earlier version's checkpoint does not say what was asked
    assert ScoreHistory(settings, made["b"], scored).progress()["scored_questions"] == "b"


def recipe(folder: Path, run: Path, **changes: Any) -> ResolvedRecipe:
    changes = {
        "train__steps": 8,
        "optim__min_lr": 1e-4,
        "checkpoint__every_steps": 0,
        "checkpoint__keep": 1,
        "early_stop": STOPPING,
    } | changes
    return runs.resolved(folder, output_dir=str(run), **changes)


def scripted(resolved: ResolvedRecipe, killed_before: int | None = None) -> None:
    """A run whose scores are SCRIPT, killed before the checkpoint of a step if one is given."""
    rename = checkpoints._rename

    def deadly(partial: Path, final: Path) -> None:
        if final.name == f"step-{killed_before}":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(partial, final)

    checkpoints._rename = deadly
    loop.distill_model(
        resolved, scorer=Scorer(lambda model, tokenizer, step, group: Score(SCRIPT[step - 1], 0.01, 100))
    )


def outcome(run: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "score", "best_step", "waited")
    return [tuple(line[key] for key in keys) for line in read_metrics(run)]


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoints.checkpoints(run / "checkpoints")]


def weights(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def test_stops_at_the_exact_patience_and_delta_whether_killed_or_not(folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert ranks.on_ranks(1, scripted, recipe(folder, whole)) == [None]
    # 0.612 is better than 0.60 by exactly 2 %: no improvement, but the best, so its checkpoint is kept.
    assert [line[2:] for line in outcome(whole)] == [
        (0.50, 1, 0), (0.51, 2, 1), (0.60, 3, 0), (0.61, 4, 1), (0.59, 4, 2), (0.612, 6, 3)
    ]  # fmt: skip
    killed = tmp_path / "killed"
    assert ranks.exit_code(scripted, recipe(folder, killed), 4) == -signal.SIGKILL
    assert names(killed) == ["step-3"], "an earlier best goes once there is a better one"
    assert ranks.on_ranks(1, scripted, recipe(folder, killed)) == [None]
    assert outcome(killed) == outcome(whole)
    assert names(killed) == names(whole) == ["step-6"]
    assert weights(killed / "final") == weights(whole / "final")


def test_the_best_outlives_the_newest_and_is_what_is_published(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changed = recipe(folder, run, early_stop=STOPPING | {"patience": 9}, checkpoint__every_steps=1, train__steps=5)
    assert ranks.on_ranks(1, scripted, changed) == [None]
    assert names(run) == ["step-4", "step-5"]
    assert _choose(run, "best") == run / "checkpoints" / "step-4"
    assert _choose(run, "latest") == run / "checkpoints" / "step-5"
    best, last = (weights(_choose(run, which) / "model") for which in ("best", "latest"))
    assert weights(run / "final") == best != last
    assert _choose(run, None) == run / "checkpoints" / "step-4", "the best is what is exported"
    # A finished run, started again with more patience, publishes again and does nothing else.
    shutil.rmtree(run / "final")
    assert ranks.on_ranks(1, scripted, changed) == [None]
    assert weights(run / "final") == best

    with (run / "checkpoints" / "step-4" / "model" / "model.safetensors").open("r+b") as file:
        file.write(b"damaged")
    with pytest.raises(CheckpointError, match=r"step-4: model/model.safetensors is damaged"):
        manifest.verified_model(_choose(run, "best"))
    (error,) = ranks.on_ranks(1, scripted, changed)
    assert isinstance(error, CheckpointError) and "step-4" in str(error)


@pytest.mark.nightly
def test_a_score_that_was_due_when_the_run_ended_is_made_up_for(folder: Path, tmp_path: Path) -> None:
    run, every = tmp_path / "run", {"checkpoint__every_steps": 1, "optim__horizon": 6}
    for stopping, steps in [({"every": 3}, 4), ({"every": 2}, 6)]:
        changed = recipe(folder, run, early_stop=STOPPING | stopping, train__steps=steps, **every)
        assert ranks.on_ranks(1, scripted, changed) == [None]
    progress = manifest.read_manifest(run / "checkpoints" / "step-6")["progress"]
    assert [entry["step"] for entry in progress["scores"]] == [3, 4, 6]


def distilled(recipes: list[ResolvedRecipe]) -> None:
    from fcsd.eval.early_score import scorer

    for resolved in recipes:
        loop.distill_model(resolved, scorer=scorer(resolved.recipe.early_stop))


def test_weights_are_the_same_with_and_without_it(folder: Path, tmp_path: Path, repo: Path) -> None:
    cases = {
        "none": {},
        "held_out": {"metric": "held_out", "every": 2},
        "benchmark": {"metric": "openbookqa", "suite": "paper", "every": 2, "limit": 2}
        | {"data_mirror": str(repo / "assets/mirror")},
    }
    how = {"train__steps": 4, "checkpoint__every_steps": 4, "checkpoint__keep": 9}
    recipes = [recipe(folder, tmp_path / name, early_stop=stopping, **how) for name, stopping in cases.items()]
    assert ranks.on_ranks(2, distilled, recipes) == [None, None]
    found = {}
    for name in cases:
        run = tmp_path / name
        found[name] = weights(run / "checkpoints" / "step-4" / "model")
        scores = [line["score"] for line in read_metrics(run) if "score" in line]
        assert len(scores) == (0 if name == "none" else 2)
        progress = manifest.read_manifest(run / "checkpoints" / "step-4")["progress"]
        assert [entry["value"] for entry in progress.get("scores", [])] == scores
        if name == "held_out":
            assert scores == [line["held_out_kl"] for line in read_metrics(run) if "score" in line]
        if name == "benchmark":
            assert [entry["n"] for entry in progress["scores"]] == [2, 2]
    assert found["none"] == found["held_out"] == found["benchmark"]


def test_scores_of_two_texts_are_not_compared(folder: Path, tmp_path: Path) -> None:
    """The file may lie in another place. A text that decides nothing may change."""
    recipe(folder, tmp_path / "scored")  # writes the text
    held_out = (folder / "held_out.jsonl").read_text()
    (tmp_path / "moved.jsonl").write_text(held_out)
    (tmp_path / "easier.jsonl").write_text(held_out.splitlines(keepends=True)[0] * 10)
    common = {"train__eval_every": 1, "checkpoint__every_steps": 1, "checkpoint__keep": 9, "optim__horizon": 4}
    moved, easier = ({"data__held_out": {"path": str(tmp_path / name)}} for name in ("moved.jsonl", "easier.jsonl"))
    scored, free = tmp_path / "scored", tmp_path / "free"
    stopping = {"early_stop": {"metric": "held_out", "every": 1}}
    first = [recipe(folder, scored, train__steps=1, **stopping, **common)]
    first += [recipe(folder, scored, train__steps=2, **stopping, **common, **moved)]
    first += [recipe(folder, free, train__steps=2, early_stop={}, **common)]
    first += [recipe(folder, free, train__steps=3, early_stop={}, **common, **easier)]
    assert ranks.on_ranks(1, distilled, first) == [None]
    before = (scored / "metrics.jsonl").read_text()
    (error,) = ranks.on_ranks(1, distilled, [recipe(folder, scored, train__steps=4, **stopping, **common, **easier)])
    assert isinstance(error, CheckpointError) and "held_out_text was" in str(error)
    assert (scored / "metrics.jsonl").read_text() == before
    with (free / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 2, "held_out_kl": 0.0, "held_out_sft": 0.0}\n')
    assert _choose(free, None).name == "step-3", "the losses of the steps before were on another text"


def test_what_cannot_be_scored_is_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    from fcsd.eval.early_score import scorer

    run = tmp_path / "run"
    with pytest.raises(ConfigError, match="scripted needs a scorer"):
        loop.distill_model(recipe(folder, run))
    assert not run.exists()
    with pytest.raises(ConfigError, match="suite 'strict' has no task 'scripted'"):
        scorer(EarlyStop(metric="scripted"))
    with pytest.raises(ConfigError, match="held_out needs data"):
        load_recipe("tiny", ["data.held_out=null", "early_stop.metric=held_out"])
    assert scorer(EarlyStop(metric="held_out")) is None
