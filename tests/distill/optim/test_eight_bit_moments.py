"""Moments in 8 bits: a run learns as with fp32 moments, resumes to the last bit, and refuses what it cannot take up.

bitsandbytes has kernels for CPUs, which nothing compiles.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch
from test_optimizer_memory import COMMON, cut_back, stored

from fcsd.config import ResolvedRecipe
from fcsd.distill import loop
from fcsd.distill.run.identity import run_identity
from fcsd.errors import CheckpointError, ConfigError
from fcsd.launch.world import World

MOMENTS = {"optim__moments": "8bit"}
ROUNDED: dict[str, Any] = {**COMMON, "train__dtype": "bf16", "optim__lr": 1e-2, "checkpoint__every_steps": 1}
CASES: dict[str, dict[str, Any]] = {
    "experts": {"parallel__ep_size": 2, "parallel__zero_stage": 2},
    "fp32 weights": {"train__dtype": "fp32", "parallel__zero_stage": 1},
}


def run_and_resume(recipes: list[tuple[ResolvedRecipe, ResolvedRecipe]]) -> None:
    """Runs each recipe, cuts it back to its first checkpoint, and resumes it. The other of a pair has fp32 moments."""
    for rounded, plain in recipes:
        loop.distill_model(plain)
        out = Path(rounded.recipe.output_dir)
        loop.distill_model(rounded)
        cut_back(out)
        loop.distill_model(rounded)


def compare(folder: Path, tmp_path: Path, cases: dict[str, dict[str, Any]], size: int = 2) -> None:
    """Runs all cases in ``size`` processes, and holds each against its run with fp32 moments and its resumed one."""
    pairs = [
        tuple(
            runs.resolved(folder, output_dir=str(tmp_path / f"{name}{end}"), **{**ROUNDED, **changes, **more})
            for end, more in (("", MOMENTS), (" plain", {}))
        )
        for name, changes in cases.items()
    ]
    assert ranks.on_ranks(size, run_and_resume, pairs) == [None] * size
    for name in cases:
        found, plain = runs.outcome(tmp_path / name), runs.outcome(tmp_path / f"{name} plain")
        assert runs.outcome(tmp_path / f"{name}.whole") == found, "resumed to the last bit"
        losses, exact = ([float.fromhex(step[0]) for step in one[0]] for one in (found, plain))
        assert losses[0] == exact[0] and losses[-1] != exact[-1], "the moments are rounded after the first step"
        assert losses == pytest.approx(exact, rel=2e-2)
        assert losses[-1] < losses[0]
        kinds = {
            kept["__bnb_optimizer_quant_state__"]["state1"].dtype
            for rank in range(size)
            for kept in moments(tmp_path / name / "checkpoints" / "step-3", rank)
        }
        assert torch.uint8 in kinds
        whole, resumed = (stored(tmp_path / run / "checkpoints" / "step-3") for run in (f"{name}.whole", name))
        assert whole == resumed


def moments(checkpoint: Path, rank: int) -> list[dict[str, Any]]:
    """What a checkpoint of ZeRO-1 or 2 has of each group."""
    state = torch.load(checkpoint / "optimizer" / f"rank-{rank}.pt", weights_only=False)
    return [*state["base_optimizer_state"]["state"].values()]


def test_experts_and_fp32_weights_learn_and_resume(folder: Path, tmp_path: Path) -> None:
    compare(folder, tmp_path, CASES)


@pytest.mark.gpu
def test_on_one_gpu_dense_weights_learn_and_resume(tmp_path: Path) -> None:
    runs.write_models(tmp_path, "llama", num_hidden_layers=2)
    compare(tmp_path, tmp_path, {"run": {"parallel__zero_stage": 1}}, size=1)


def test_divided_dense_weights_learn_and_resume_on_as_many_ranks_alone(tmp_path: Path) -> None:
    runs.write_models(tmp_path, "llama", num_hidden_layers=2)
    changes = {"parallel__zero_stage": 1, "parallel__tp_size": 2}
    compare(tmp_path, tmp_path, {"run": changes})
    for step in (2, 3):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step}", ignore_errors=True)
    for degree, size in ((1, 1), (1, 2), (2, 4)):
        other = {**ROUNDED, **MOMENTS, **changes, "parallel__tp_size": degree}
        recipe = runs.resolved(tmp_path, output_dir=str(tmp_path / "run"), **other)
        with pytest.raises(CheckpointError, match=r"a run with optim\.moments 8bit resumes on as many GPUs"):
            runs.train(recipe, size)


def test_what_cannot_work_is_refused_and_another_run(folder: Path) -> None:
    for changes, reason in (
        ({"parallel__zero_stage": 0}, r"cannot be combined with parallel\.zero_stage 0"),
        ({"optim__offload": "host"}, "cannot be combined with optim.offload host"),
    ):
        with pytest.raises(ConfigError, match=rf"optim\.moments 8bit {reason}"):
            runs.resolved(folder, **MOMENTS, **changes)
    world = World(0, 1, torch.device("cpu"))
    one, other = (run_identity(runs.resolved(folder, **changes).recipe, [], world) for changes in ({}, MOMENTS))
    assert {key: value for key, value in other.items() if key not in one} == {"optim.moments": "8bit"}
