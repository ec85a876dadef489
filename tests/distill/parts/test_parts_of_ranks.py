"""Converted layers that train alone, with sharded layers and with divided experts: whole runs.

They have the bits of blocking communication and of a second model as the teacher, the numbers of one process, and
checkpoints that other numbers of ranks continue and export.
"""

from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch
from safetensors.torch import load_file

from fcsd.config import ResolvedRecipe
from fcsd.distill import loop, parts, prepare
from fcsd.distill.run.report import read_metrics

ALONE: dict[str, Any] = {
    "optim__train": ["converted"],
    "optim__lr": 1e-4,
    "optim__grad_clip": 0.5,
    "optim__weight_decay": 0.1,
    "train__eval_every": 2,
}
RECOMPUTED = {"train__activation_checkpointing": True, "train__micro_batch_size": 1}
LADDER = {"wiring": "ladder", "layers": "last:2"}
BF16 = {"train__dtype": "bf16"}
BLOCKING = {"parallel__overlap": "off"}
Numbers = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher whose heads four ranks can share, with biases that the first rank alone trains."""
    folder = tmp_path_factory.mktemp("dense")
    runs.write_models(folder, "llama", attention_bias=True, mlp_bias=True, num_key_value_heads=4)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with experts, of which the first layer has none."""
    folder = tmp_path_factory.mktemp("experts")
    runs.write_models(folder, "deepseek_v2")
    return folder


def recipe(folder: Path, out: Path, **changes: Any) -> ResolvedRecipe:
    start = {"model": str(folder / "teacher"), "init": LADDER if "dense" in folder.name else FARSKIP}
    return runs.resolved(folder, output_dir=str(out), **{**ALONE, **start, **changes})


FARSKIP = {"wiring": "farskip", "layers": "last:2"}


def with_a_second_model(recipe: ResolvedRecipe) -> None:
    prepare.shares_weights = lambda recipe: False
    loop.distill_model(recipe)


def close(one: Numbers, other: Numbers, atol: float = 1e-5) -> None:
    """Two runs agree up to rounding in fp32."""
    for mine, reference in zip(one[0], other[0], strict=True):
        assert mine == pytest.approx(reference, rel=2e-5)
    assert one[1].keys() == other[1].keys()
    for name, weight in other[1].items():
        if not name.endswith("k_proj.bias"):  # attention does not change with it, so that rounding errors train it
            torch.testing.assert_close(one[1][name], weight, rtol=1e-5, atol=atol, msg=lambda m: f"{name}: {m}")  # noqa: B023


def same(one: Numbers, other: Numbers) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], weight) for name, weight in other[1].items())


def whole_parts(run: Path, step: int) -> dict[str, tuple[int, ...]]:
    found = parts.read_parts(run / "checkpoints" / f"step-{step}" / "parts")
    return {name: tuple(value.shape) for name, value in found.items()}


def check_all(folder: Path, out: Path, shared_by: str, four: dict[str, dict[str, Any]], every: bool) -> None:
    """Runs two processes in all ways, and four in those of ``four``; compares all, and resumed runs, with one.

    Args:
        every: whether two processes run in bf16 and with blocking communication, too, which every day is that of runs
            in which all weights train.
    """
    two = {shared_by: 2}
    ways = {"": {}, ", recomputed": RECOMPUTED}
    if every:
        ways |= {", blocking": BLOCKING, ", bf16": BF16, ", bf16, blocking": {**BF16, **BLOCKING}}
    cases = {2: {f"two{way}": {**two, **changes} for way, changes in ways.items()}, 4: four}
    for size, some in {1: {"one": {}}, **cases}.items():
        runs.train_all([recipe(folder, out / name, **changes) for name, changes in some.items()], size)
    ranks.results(2, with_a_second_model, recipe(folder, out / "second model", **two))
    single = runs.numbers(out / "one")
    base = load_file(folder / "teacher" / "model.safetensors")
    changed = {name for name, weight in single[1].items() if not torch.equal(weight, base[name])}
    assert {name.split(".")[2] for name in changed} == {"2", "3"}, (
        "the last two of four layers train, and all else is frozen"
    )
    for name in (name for some in cases.values() for name in some):
        if "bf16" not in name:
            close(runs.numbers(out / name), single)
        assert whole_parts(out / name, 4) == whole_parts(out / "one", 4)
    if every:
        same(runs.numbers(out / "two"), runs.numbers(out / "two, blocking"))
        same(runs.numbers(out / "two, bf16"), runs.numbers(out / "two, bf16, blocking"))
    same(runs.numbers(out / "two"), runs.numbers(out / "second model"))
    resumed = recipe(folder, runs.cut_short(out / "two", out / "resumed"), **two)
    runs.train(resumed, 2)
    same(runs.numbers(out / "resumed"), runs.numbers(out / "two"))
    # Any checkpoint is merged in one process.
    parts.merge_checkpoint(resumed.recipe, out / "resumed" / "checkpoints" / "step-4" / "parts", out / "merged")
    merged = load_file(out / "merged" / "model.safetensors")
    assert all(torch.equal(merged[name], weight) for name, weight in runs.numbers(out / "two")[1].items())
    steps = [line["step"] for line in read_metrics(out / "resumed")]
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("four", "every"),
    [
        ({"two by two": {"parallel__tp_size": 2, "parallel__zero_stage": 2}}, False),
        pytest.param({"four": {"parallel__tp_size": 4}}, True, marks=pytest.mark.nightly),
    ],
    ids=["day", "night"],
)
def test_sharded_layers_train_alone_as_in_one_process(
    dense: Path, tmp_path: Path, four: dict[str, dict[str, Any]], every: bool
) -> None:
    check_all(dense, tmp_path, "parallel__tp_size", four, every)
    # Other degrees continue a checkpoint of two ranks.
    for degree in (1, 4) if every else (1,):
        run = runs.cut_short(tmp_path / "two", tmp_path / f"continued by {degree}")
        runs.train(recipe(dense, run, parallel__tp_size=degree), degree)
        close(runs.numbers(run), runs.numbers(tmp_path / "two"))


@pytest.mark.parametrize(
    ("stage", "every"), [(2, False), pytest.param(0, True, marks=pytest.mark.nightly)], ids=["day", "night"]
)
def test_divided_experts_train_alone_as_in_one_process(experts: Path, tmp_path: Path, stage: int, every: bool) -> None:
    four = {f"two by two, stage {stage}": {"parallel__ep_size": 2, "parallel__zero_stage": stage}}
    check_all(experts, tmp_path, "parallel__ep_size", four, every)
