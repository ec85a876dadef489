"""NaN and infinity: the step changes nothing on any rank, is counted, and ends the run when it is one too many."""

import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch

from fcsd.distill import loop, prepare
from fcsd.distill.run import checkpoints, manifest
from fcsd.distill.run.report import read_metrics
from fcsd.distill.teacher.targets import LiveTeacher

TEACHERS = {"teacher": torch.nan, "infinite teacher": 3e38, "indifferent teacher": 0.0}


def poisoned(recipe: Any, where: str, steps: tuple[int, ...]) -> None:
    """A run whose teacher's or gradients' numbers are broken in some steps, on the last rank only."""
    build, launch_step = prepare.build_training, loop.launch_step
    now, here = 0, os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

    def broken(place: str) -> bool:
        return here and now in steps and place == where

    def counted(*arguments: Any) -> Any:
        nonlocal now
        now = arguments[-1]
        return launch_step(*arguments)

    def built(model: Any, *arguments: Any) -> Any:
        model.lm_head.weight.register_hook(lambda grad: grad * torch.inf if broken("gradient") else grad)
        return build(model, *arguments)

    class Spoilt(LiveTeacher):
        def get_targets(self, *batch: Any) -> Any:
            targets = super().get_targets(*batch)
            hidden, head = targets.output
            factor = next((factor for place, factor in TEACHERS.items() if broken(place)), 1.0)
            return targets._replace(output=(hidden * factor, head))

    prepare.build_training, loop.launch_step = built, counted
    prepare.LiveTeacher = Spoilt
    loop.distill_model(recipe)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's engine files, the optimizer's moments among them, and of its model."""

    def walk(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict | list | tuple):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                walk(item, f"{name}/{key}")

    found: dict[str, torch.Tensor] = {}
    for path in checkpoint.rglob("*.pt"):
        walk(torch.load(path, weights_only=False), path.name)
    return found


nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("where", "size", "stage", "dtype", "optim"),
    [
        ("teacher", 2, 1, "fp32", {}),
        ("gradient", 1, 0, "fp32", {}),
        ("gradient", 2, 1, "bf16", {}),
        pytest.param("teacher", 2, 2, "bf16", {}, marks=nightly),
        pytest.param("gradient", 2, 2, "fp32", {}, marks=nightly),
        pytest.param("teacher", 1, 0, "bf16", {}, marks=nightly),
        pytest.param("gradient", 1, 0, "bf16", {}, marks=nightly),
        pytest.param("infinite teacher", 2, 1, "fp32", {}, marks=nightly),
        pytest.param("gradient", 2, 2, "bf16", {"optim__offload": "host"}, marks=nightly),
        ("gradient", 2, 2, "bf16", {"optim__moments": "8bit"}),
    ],
)
def test_a_skipped_step_changes_nothing_and_training_goes_on(
    folder: Path, tmp_path: Path, where: str, size: int, stage: int, dtype: str, optim: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    changes = {
        "parallel__zero_stage": stage,
        "train__dtype": dtype,
        "checkpoint__every_steps": 1,
        "checkpoint__keep": 9,
        **optim,
    }
    recipe = runs.resolved(folder, output_dir=str(run), faults__nonfinite_skip=1, train__steps=5, **changes)
    codes, said = ranks.exit_codes(size, poisoned, recipe, where, (2, 4))  # not in a row
    assert codes == [0] * size, said
    metrics = read_metrics(run)
    assert [m.get("skipped_steps") for m in metrics] == [None, 1, None, 2, None]
    assert [m["grad_norm"] is None for m in metrics] == [False, True, False, True, False]
    assert said.count("rows 8 to 15") == 1
    before, after, later = (tensors(run / "checkpoints" / f"step-{n}") for n in (1, 2, 3))
    assert len(before) > 3 and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(before[name], later[name]) for name in before)
    assert manifest.read_manifest(run / "checkpoints" / "step-4")["progress"]["skipped"] == [2, 1]


def test_a_step_that_is_judged_after_the_next_was_launched_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """Nothing is logged or saved after these steps, so the host looks at their numbers late."""
    common = {"train__steps": 6, "train__log_every": 99, "checkpoint__every_steps": 0, "faults__nonfinite_skip": 1}
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "poisoned"), **common)
    assert ranks.exit_codes(1, poisoned, recipe, "gradient", (2, 4))[0] == [0]
    metrics = read_metrics(tmp_path / "poisoned")
    assert [(line["step"], line.get("skipped_steps"), line["grad_norm"] is None) for line in metrics] == [
        (1, None, False), (2, 1, True), (4, 2, True), (6, None, False)
    ]  # fmt: skip
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "ended"), **(common | {"faults__nonfinite_skip": 0}))
    codes, said = ranks.exit_codes(1, poisoned, recipe, "gradient", (3,))
    assert codes == [5] and "step 3, rows 16 to 23: grad_norm" in said
    assert not checkpoints.checkpoints(tmp_path / "ended" / "checkpoints")


def test_one_too_many_ends_every_rank(folder: Path, tmp_path: Path) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), faults__nonfinite_skip=1)
    codes, said = ranks.exit_codes(2, poisoned, recipe, "teacher", (3, 4))
    assert codes == [5, 5]
    assert "step 4, rows 24 to 31: loss nan, kl nan" in said and "step-2" in said
    assert [path.name for path in checkpoints.checkpoints(tmp_path / "run" / "checkpoints")] == ["step-2"]


@nightly
def test_a_teacher_to_whom_all_words_are_equal_is_no_reason_to_stop(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = runs.resolved(folder, output_dir=str(run), train__steps=3)
    assert ranks.exit_codes(2, poisoned, recipe, "indifferent teacher", (2,))[0] == [0, 0]
    one, other, _ = (record["kl"] for record in read_metrics(run))
    assert other is not None and other >= 0 and other != one
