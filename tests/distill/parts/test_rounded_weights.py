"""Runs that heal a student with INT4 weights: its teacher is not rounded, what trains is not, and final/ is."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from reloads import fork_reloads
from runs import outcome, train
from safetensors.torch import load_file

from fcsd.errors import ConfigError
from fcsd.export.final import export_model
from fcsd.models.rounded import to_int4

ROUNDED: dict[str, Any] = {
    "init": {"wiring": "ladder", "layers": "last:2"},
    "optim__train": ["converted"],
    "train__weight_format": "int4:g16",
}
PARTS = Path("parts") / "parts.safetensors"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    runs.write_models(folder, "llama")
    return folder


def recipe(dense: Path, out: Path, **changes: Any) -> Any:
    return runs.resolved(dense, model=str(dense / "teacher"), output_dir=str(out), **{**ROUNDED, **changes})


def test_final_and_exports_have_rounded_weights(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(recipe(dense, tmp_path / "run"))
    base, final = (load_file(path / "model.safetensors") for path in (dense / "teacher", tmp_path / "run" / "final"))
    trained = load_file(tmp_path / "run" / "checkpoints" / "step-4" / PARTS)
    for name, weight in {**base, **trained}.items():
        rounded = ".layers." in name and weight.ndim == 2
        assert torch.equal(final[name], to_int4(weight, 16) if rounded else weight), name
        assert not rounded or not torch.equal(final[name], weight)
    fork_reloads(monkeypatch)
    export_model(tmp_path / "run", tmp_path / "out", checkpoint="latest")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == final.keys() and all(torch.equal(exported[name], final[name]) for name in final)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_two_steps_and_a_resume_are_four_steps(dense: Path, tmp_path: Path, size: int) -> None:
    changes = {"train__dtype": "bf16", "parallel__zero_stage": 2} if size > 1 else {"train__dtype": "bf16"}
    train(recipe(dense, tmp_path / "run", **changes), size)
    shutil.copytree(tmp_path / "run", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "final")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step-4")
    train(recipe(dense, tmp_path / "part", **changes), size)
    assert outcome(tmp_path / "part") == outcome(tmp_path / "run")


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
