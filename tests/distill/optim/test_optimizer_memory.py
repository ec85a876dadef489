"""An optimizer on the host takes the same steps as one beside the weights."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import runs
import torch
import torch.distributed as dist

from fcsd.config import ResolvedRecipe
from fcsd.distill import loop
from fcsd.distill.optim.update import update
from fcsd.distill.run.identity import run_identity
from fcsd.distill.run.manifest import read_manifest
from fcsd.distill.run.report import opening
from fcsd.errors import ConfigError
from fcsd.launch.world import World

COMMON: dict[str, Any] = {
    "train__steps": 3,
    "optim__grad_clip": 0.3,
    "optim__warmup_steps": 0,
    "optim__schedule": "constant",
    "checkpoint__keep": 9,
    "data__held_out": None,
}
HOST = {"optim__offload": "host"}
SAVED = {"checkpoint__every_steps": 1, "checkpoint__overlap": True}


def distill(recipes: list[ResolvedRecipe]) -> None:
    """Runs recipes one after the other. Those with checkpoints are cut back to the first one and resumed.

    The first run writes its checkpoints beside its steps, but for the last one. The resumed run waits for each.
    """
    for resolved in recipes:
        out = Path(resolved.recipe.output_dir)
        loop.distill_model(resolved)
        if resolved.recipe.checkpoint.every_steps:
            cut_back(out)
            waits = resolved.recipe.checkpoint.model_copy(update={"overlap": False})
            loop.distill_model(replace(resolved, recipe=resolved.recipe.model_copy(update={"checkpoint": waits})))


def cut_back(out: Path) -> None:
    """Keeps a copy of a run of three steps beside it, and cuts it back to its first checkpoint. All ranks call this."""
    if dist.get_rank() == 0:
        shutil.copytree(out, out.with_suffix(".whole"))
        shutil.rmtree(out / "final")
        for step in (2, 3):
            shutil.rmtree(out / "checkpoints" / f"step-{step}")
    dist.barrier()


def stored(checkpoint: Path) -> dict[str, Any]:
    """By file, what a checkpoint holds: the hash of the file, or the bits of the values in an optimizer's pickle.

    Pickles of equal values may differ in the order in which they name them.
    """
    files = dict(read_manifest(checkpoint)["files"])
    pickles = [name for name in files if name.startswith("optimizer/")]
    assert pickles
    return files | {name: bits(torch.load(checkpoint / name, weights_only=False)) for name in pickles}


def bits(value: Any) -> Any:
    """The value, with a comparable one in place of each tensor and of each object of DeepSpeed."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.shape, value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return value if isinstance(value, int | float | str | None) else (type(value).__name__, repr(vars(value)))


ARCH = "qwen3_moe"
TWO = {"train__dtype": "bf16", "parallel__zero_stage": 2}
SUMMED = {**TWO, "optim__accumulate_dtype": "fp32", "train__micro_batch_size": 1}
EVERY_DAY: dict[str, dict[str, Any]] = {"bf16": TWO, "bf16 on the host": {**TWO, **HOST, **SAVED}}
AT_NIGHT: dict[str, dict[str, Any]] = {
    "fp32": {"parallel__zero_stage": 1},
    "fp32 on the host": {"parallel__zero_stage": 1, **HOST, **SAVED},
    "summed in fp32": SUMMED,
    "summed in fp32 on the host": {**SUMMED, **HOST},
    "without ZeRO": {"train__dtype": "bf16", "parallel__zero_stage": 0, **SAVED},
}


@pytest.mark.parametrize("cases", [EVERY_DAY, pytest.param(AT_NIGHT, marks=pytest.mark.nightly)])
def test_runs_on_the_host_equal_runs_beside_the_weights_and_resume(
    folder: Path, tmp_path: Path, cases: dict[str, dict[str, Any]]
) -> None:
    """Two processes that divide the experts; all runs in one pair of processes, which is cheaper."""
    common = {**COMMON, "parallel__ep_size": 2, "checkpoint__every_steps": 0}
    recipes = [
        runs.resolved(folder, output_dir=str(tmp_path / name), **{**common, **changes})
        for name, changes in cases.items()
    ]
    saved = [name for name, changes in cases.items() if changes.keys() >= SAVED.keys()]
    assert ranks.on_ranks(2, distill, recipes) == [None] * 2
    found = {name: runs.outcome(tmp_path / name) for name in cases}
    for name in saved:
        assert runs.outcome(tmp_path / f"{name}.whole") == found[name], "resumed to the last bit"
        # A checkpoint that was written beside the steps, and one that they waited for.
        beside, blocking = (stored(tmp_path / run / "checkpoints" / "step-2") for run in (f"{name}.whole", name))
        assert beside == blocking
    pairs = [(name, f"{name} on the host") for name in cases if f"{name} on the host" in cases]
    assert pairs and all(found[here] == found[there] for here, there in pairs)


def test_a_norm_that_the_host_has_computed_is_a_number(folder: Path) -> None:
    """On a GPU it could not be read back together with the loss, which is on the device."""
    engine = SimpleNamespace(optimizer=None, step=lambda: None, get_global_grad_norm=lambda: torch.tensor(2.0))
    world = World(0, 1, torch.device("cpu"))
    found = [update(engine, runs.resolved(folder, **changes).recipe, world) for changes in ({}, HOST)]
    assert isinstance(found[0], torch.Tensor) and found[1] == 2.0 and isinstance(found[1], float)


def test_what_cannot_work_is_refused_and_what_runs_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim\.offload host cannot be combined with parallel\.zero_stage 0"):
        runs.resolved(folder, parallel__zero_stage=0, **HOST)
    plain, away = runs.resolved(folder).recipe, runs.resolved(folder, **HOST).recipe
    assert "AdamW" not in opening(plain, tmp_path, 0)
    line = opening(away, tmp_path, 0).splitlines()[-1]
    assert line.startswith("The optimizer is torch's fused AdamW with fp32 moments on the host, with ")
    assert line.endswith("Nothing is compiled.")
    # Runs from before the fields existed had the defaults; another value is another run.
    world = World(0, 1, torch.device("cpu"))
    one, other = (run_identity(recipe, [], world) for recipe in (plain, away))
    assert {key: value for key, value in other.items() if key not in one} == {"optim.offload": "host"}
