"""ZeRO-3 in whole runs: the numbers and checkpoints of ZeRO-1, with weights that no process has as a whole."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import tiny
import torch
from safetensors.torch import load_file

from fcsd.config import ResolvedRecipe
from fcsd.distill import loop
from fcsd.distill.run.report import read_metrics
from fcsd.distill.step import engine

SMALL = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 5000,
}
STAGE = {"parallel__zero_stage": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, its conversion and a corpus."""
    folder = tmp_path_factory.mktemp("qwen3")
    runs.write_models(folder, "qwen3")
    return folder


def distill(recipes: list[ResolvedRecipe]) -> None:
    """Runs recipes in which ZeRO-3 divides even the smallest weight, and keeps none longer than a pass needs it."""
    configure = engine.deepspeed_config

    def with_small_weights(*arguments: Any, **options: Any) -> dict[str, Any]:
        config = configure(*arguments, **options)
        if config["zero_optimization"]["stage"] == 3:
            config["zero_optimization"] |= SMALL
        return config

    engine.deepspeed_config = with_small_weights
    for recipe in recipes:
        loop.distill_model(recipe)


def run_all(folder: Path, out: Path, cases: dict[str, dict[str, Any]], size: int = 2) -> dict[str, tuple[Any, Any]]:
    recipes = [runs.resolved(folder, output_dir=str(out / name), **cases[name]) for name in cases]
    for result in ranks.on_ranks(size, distill, recipes):
        if isinstance(result, Exception):
            raise result
    return {name: numbers(out / name) for name in cases}


def numbers(run: Path) -> tuple[Any, Any]:
    kept = ("loss", "kl", "sft", "hidden", "grad_norm", "held_out_kl", "held_out_sft")
    metrics = [{key: line[key] for key in kept if key in line} for line in read_metrics(run)]
    return metrics, load_file(run / "final" / "model.safetensors")


def cut_short(run: Path, copy: Path, last: int) -> Path:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "final")
    shutil.rmtree(copy / "checkpoints" / f"step-{last}")
    return copy


CACHE = {"objective__sft": 0.0}


@pytest.mark.parametrize("name", ["desync", "anneal", "far", "three", "four", "adapter", "one"])
def test_proto(folder: Path, tmp_path: Path, name) -> None:
    size, case = {
        "desync": (2, {"model": str(folder / "teacher"), "init__wiring": "desync-2x", "init__tp_degree": 2}),
        "far": (2, {"model": str(folder / "teacher"), "init__wiring": "ladder", "init__distance": 2}),
        "anneal": (2, {"train__anneal_share": 0.5}),
        "three": (3, {"train__batch_tokens": 192}),
        "four": (4, {"train__dtype": "bf16", "optim__accumulate_dtype": "fp32"}),
        "adapter": (2, {"train__adapter": {"kind": "lora", "rank": 4}}),
        "one": (1, {}),
    }[name]
    one = run_all(folder, tmp_path / "1", {name: {**case, "parallel__zero_stage": 2}}, size)
    three = run_all(folder, tmp_path / "3", {name: {**case, "parallel__zero_stage": 3}}, size)
    print(name)
    for a, b in zip(one[name][0], three[name][0]):
        print(a == b, {k: (a[k]-b[k])/a[k] for k in a})
    print(name, "max", max((one[name][1][w].float()-three[name][1][w].float()).abs().max() for w in one[name][1]))
