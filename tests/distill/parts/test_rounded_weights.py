"""Runs that heal a student with INT4 weights: its teacher is not rounded, what trains is not, and final/ is."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from runs import outcome, train
from safetensors.torch import load_file, save_file

from fcsd.distill.parts.files import merge_checkpoint
from fcsd.distill.run.report import read_metrics
from fcsd.errors import ConfigError
from fcsd.models.rounded import to_int4

ROUNDED: dict[str, Any] = {
    "init": {"wiring": "ladder", "layers": "last:2"},
    "optim__train": ["converted"],
    "train__weight_format": "int4:g16",
    "train__dtype": "bf16",
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    runs.write_models(folder, "llama")
    return folder


def recipe(dense: Path, out: Path, **changes: Any) -> Any:
    return runs.resolved(dense, output_dir=str(out), **{"model": str(dense / "teacher"), **ROUNDED, **changes})


@pytest.fixture(scope="module")
def finished(dense: Path) -> Path:
    """A run of four steps with checkpoints after two and four."""
    train(recipe(dense, dense / "run"))
    return dense / "run"


def test_final_and_exports_have_rounded_weights(dense: Path, finished: Path, tmp_path: Path) -> None:
    checkpoint = finished / "checkpoints" / "step-4" / "parts"
    merge_checkpoint(recipe(dense, finished).recipe, checkpoint, tmp_path / "merged")
    base, trained = load_file(dense / "teacher" / "model.safetensors"), load_file(checkpoint / "parts.safetensors")
    final, merged = (load_file(path / "model.safetensors") for path in (finished / "final", tmp_path / "merged"))
    assert base.keys() == final.keys() == merged.keys() and trained.keys() < base.keys()
    for name, weight in {**base, **trained}.items():
        weight = weight.bfloat16()
        expected = to_int4(weight, 16) if ".layers." in name and weight.ndim == 2 else weight
        assert torch.equal(final[name], expected) and torch.equal(merged[name], expected), name
        assert torch.equal(expected, weight) != (".layers." in name and weight.ndim == 2)


def test_the_first_loss_is_that_of_a_student_with_rounded_weights(dense: Path, finished: Path, tmp_path: Path) -> None:
    """Such a student, with the original as its teacher, is trained as usual."""
    shutil.copytree(dense / "teacher", tmp_path / "rounded")
    weights = load_file(dense / "teacher" / "model.safetensors")
    for name, weight in weights.items():
        if ".layers." in name and weight.ndim == 2:
            weights[name] = to_int4(weight.bfloat16(), 16).float()
    save_file(weights, tmp_path / "rounded" / "model.safetensors", metadata={"format": "pt"})
    student = {"model": str(tmp_path / "rounded"), "teacher": str(dense / "teacher")}
    usual = {"optim__train": [], "train__weight_format": None}
    train(recipe(dense, tmp_path / "run", **student, **usual))
    one, first = read_metrics(tmp_path / "run")[0], read_metrics(finished)[0]
    assert (one["step"], one["loss"], one["kl"]) == (first["step"], first["loss"], first["kl"])


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_two_steps_and_a_resume_are_four_steps(dense: Path, finished: Path, tmp_path: Path, size: int) -> None:
    run, changes = finished, {}
    if size > 1:
        run, changes = tmp_path / "run", {"parallel__zero_stage": 2}
        train(recipe(dense, run, **changes), size)
    shutil.copytree(run, tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "final")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step-4")
    train(recipe(dense, tmp_path / "part", **changes), size)
    assert outcome(tmp_path / "part") == outcome(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim__train": []}, r"train.weight_format needs optim.train, for example \[converted\]"),
        ({"train__adapter": {"rank": 4}}, "train.weight_format cannot be combined with train.adapter"),
        ({"train__compile": True}, "train.weight_format cannot be combined with train.compile"),
        ({"train__weight_format": "int4:g48"}, "train.weight_format"),
    ],
)
def test_settings_that_contradict_it_are_refused(
    dense: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(dense, tmp_path, **changes)
