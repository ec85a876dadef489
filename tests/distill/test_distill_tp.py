"""Tensor parallelism in whole runs: the numbers of one process, the bits of blocking sums, and checkpoints of both."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch
import torch.distributed as dist

from fcsd.config import ResolvedRecipe
from fcsd.distill import loop
from fcsd.distill.preview import preview
from fcsd.errors import ConfigError
from fcsd.parallel.tensor.shard import SHARDED

ARCH = "qwen3"
SHARDED_RUN = {"parallel__tp_size": 2}
STEPS = {"train__steps": 2, "optim__lr": 1e-4, "checkpoint__every_steps": 0, "optim__grad_clip": 0.5}
RECOMPUTED = {"train__activation_checkpointing": True, "train__micro_batch_size": 1, "train__sample_tokens": 2}
SCRATCH = {"objective__kl": 0.0, "objective__sft": 1.0, "train__steps": 6, "optim__lr": 1e-2}
HIDDEN = {"objective__hidden": {"weight": 0.1, "layers": "all"}}


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for a family whose row-parallel products have biases, which the first rank alone trains."""
    folder = tmp_path_factory.mktemp("biased")
    runs.write_models(folder, "llama", attention_bias=True, mlp_bias=True)
    return folder


def distill(recipes: list[ResolvedRecipe]) -> None:
    """Runs recipes one after the other; what every rank has must have the same bits on all ranks after each step."""
    finish = loop.finish_step

    def finish_and_compare(run: Any, *arguments: Any) -> None:
        finish(run, *arguments)
        whole = [p.detach() for p in run.student.parameters() if not getattr(p, SHARDED, False)]
        mine = torch.cat([parameter.reshape(-1).double() for parameter in whole])
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(mine, first)

    loop.finish_step = finish_and_compare
    for recipe in recipes:
        loop.distill_model(recipe)


def run_all(folder: Path, out: Path, size: int, cases: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Metrics and weights of runs in ``size`` processes, by the name of the case."""
    recipes = [runs.resolved(folder, output_dir=str(out / name), **{**STEPS, **cases[name]}) for name in cases]
    ranks.results(size, distill, recipes)
    return {name: runs.numbers(out / name) for name in cases}


def assert_close(one: tuple[Any, Any], other: tuple[Any, Any], what: str, atol: float) -> None:
    """Two runs agree up to rounding in fp32."""
    for mine, reference in zip(one[0], other[0], strict=True):
        assert mine == pytest.approx(reference, rel=2e-5), what
    assert one[1].keys() == other[1].keys()
    for name, weight in other[1].items():
        torch.testing.assert_close(one[1][name], weight, rtol=1e-5, atol=atol, msg=lambda m: f"{what} {name}: {m}")  # noqa: B023


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], weight) for name, weight in other[1].items())


@pytest.mark.parametrize(
    ("wiring", "rounded"),
    [({"wiring": "desync-2x", "gpus": 2}, False), pytest.param({"wiring": "ladder"}, True, marks=pytest.mark.nightly)],
    ids=["desync", "ladder"],
)
def test_runs_are_those_of_one_process(folder: Path, tmp_path: Path, wiring: dict[str, Any], rounded: bool) -> None:
    """``wiring`` is that of a run from random weights; every day the layers of ladder train as parts of ranks.

    ``rounded`` runs in bf16, too, which checkpoints of other degrees do every day.
    """
    start = {"model": str(folder / "teacher"), **SCRATCH}
    scratch: dict[str, dict[str, Any]] = {"from scratch": {**start, "init": {"weights": "random", **wiring}}}
    bf16: dict[str, dict[str, Any]] = {"bf16": {**SHARDED_RUN, "train__dtype": "bf16"}}
    bf16["bf16 blocking"] = {**bf16["bf16"], "parallel__overlap": "off"}
    single = run_all(folder, tmp_path / "1", 1, {"plain": {}, "hidden": HIDDEN, **scratch})
    two = run_all(
        folder,
        tmp_path / "2",
        2,
        {
            "plain": SHARDED_RUN,
            "blocking": {**SHARDED_RUN, "parallel__overlap": "off"},
            "recomputed": {**SHARDED_RUN, **RECOMPUTED},
            "hidden": {**SHARDED_RUN, **HIDDEN, "train__activation_checkpointing": True, "parallel__zero_stage": 2},
            **{name: {**SHARDED_RUN, **changes} for name, changes in scratch.items()},
            **(bf16 if rounded else {}),
        },
    )
    four = run_all(folder, tmp_path / "4", 4, {"plain": {**SHARDED_RUN, "parallel__zero_stage": 2}})
    assert_same(two["plain"], two["blocking"])
    if rounded:
        assert_same(two["bf16"], two["bf16 blocking"])
    for name in scratch:
        losses = [line["loss"] for line in two[name][0]]
        assert len(losses) == 6 and losses[-1] < losses[0] - 0.1  # the model learns something
    for name, run in (*two.items(), *four.items()):
        if not name.startswith("bf16"):
            # AdamW's first steps have the size of the learning rate, however small a gradient is.
            assert_close(run, single.get(name, single["plain"]), name, atol=3e-4 if name in scratch else 1e-5)
    assert (tmp_path / "2" / "recomputed" / "samples.jsonl").exists()


def test_checkpoints_do_not_depend_on_the_degree(biased: Path, tmp_path: Path) -> None:
    """Runs of one and of two ranks for each copy of the model, and the same runs resumed by other numbers of ranks."""

    def recipe(run: Path, degree: int, dtype: str) -> ResolvedRecipe:
        options = {"train__dtype": dtype, "optim__lr": 1e-4, "optim__weight_decay": 0.1, "train__eval_every": 0}
        return runs.resolved(biased, output_dir=str(run), parallel__tp_size=degree, **options)

    def resumed(case: tuple[str, int, int], size: int) -> ResolvedRecipe:
        dtype, then, now = case
        name = f"{dtype}-{then}" if now == size else f"{dtype}-{then}-copies"
        return recipe(runs.cut_short(tmp_path / name, tmp_path / f"{name}-{now}"), now, dtype)

    for size in (1, 2):
        runs.train_all([recipe(tmp_path / f"{dtype}-{size}", size, dtype) for dtype in ("fp32", "bf16")], size)
    runs.train(recipe(tmp_path / "fp32-2-copies", 2, "fp32"), 4)
    runs.train_all([resumed(("fp32", 2, 2), 2), resumed(("fp32", 1, 2), 2), resumed(("bf16", 1, 2), 2)], 2)
    runs.train_all([resumed(("fp32", 2, 1), 1), resumed(("bf16", 2, 1), 1)], 1)
    runs.train(resumed(("fp32", 2, 1), 2), 2)
    assert_same(runs.numbers(tmp_path / "fp32-2-2"), runs.numbers(tmp_path / "fp32-2"))
    of_one = runs.cut_short(tmp_path / "fp32-2-copies", tmp_path / "fp32-2-copies-one")
    runs.train(recipe(of_one, 1, "fp32"), 1)
    fp32 = ("fp32-1-2", "fp32-2-1", "fp32-2-copies-1", "fp32-2-copies-one")
    for name, tolerance in (*((name, 1e-4) for name in fp32), ("bf16-2-1", 2e-2), ("bf16-1-2", 2e-2)):
        mine, reference = runs.numbers(tmp_path / name), runs.numbers(tmp_path / name.rpartition("-")[0])
        assert mine[0][:2] == reference[0][:2]
        for one, other in zip(mine[0][2:], reference[0][2:], strict=True):
            assert one == pytest.approx(other, rel=tolerance), name
        for weight_name, weight in reference[1].items():
            # Attention does not change with the bias of its keys, so AdamW trains that bias by rounding errors.
            if not weight_name.endswith("k_proj.bias"):
                torch.testing.assert_close(mine[1][weight_name], weight, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel__tp_size": 3}, r"parallel.tp_size 3 does not divide the 4 processes"),
        ({"parallel__tp_size": 4}, r"student: parallel.tp_size 4 does not divide num_key_value_heads 2"),
        ({"parallel__tp_size": 2, "parallel__ep_size": 2}, "parallel.ep_size above 1"),
        ({"parallel__tp_size": 2, "parallel__zero_stage": 0}, "cannot be combined with parallel.zero_stage 0"),
        ({"parallel__tp_size": 2, "optim__offload": "host"}, "cannot be combined with optim.offload host"),
        ({"parallel__tp_size": 2, "train__compile": True}, "cannot be combined with train.compile"),
        (
            {"parallel__tp_size": 2, "train__adapter": {}},
            "cannot be combined with train.adapter",
        ),
        (
            {"parallel__tp_size": 2, "model": "teacher", "init__wiring": "desync-2x", "init__gpus": 4},
            "2 tensor-parallel ranks cannot train .*teacher: desync-2x of tp_degree 4",
        ),
    ],
)
def test_what_tensor_parallelism_cannot_do_is_refused_before_anything_loads(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    changes = {**changes, **({"model": str(folder / changes["model"])} if "model" in changes else {})}
    with pytest.raises(ConfigError, match=message):
        preview(runs.resolved(folder, output_dir=str(tmp_path), **changes).recipe, 4)


def test_a_dry_run_says_how_the_processes_are_divided(folder: Path, tmp_path: Path) -> None:
    text = preview(runs.resolved(folder, output_dir=str(tmp_path), **SHARDED_RUN).recipe, 4)
    assert "256 tokens = 8 rows of 32 = 2 rows * 4 processes / 2 that shard each model * 2 micro-batches" in text
