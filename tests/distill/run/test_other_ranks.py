"""Runs go on with another number of ranks: with the same state of the optimizer, the same rows, and the same losses.

AdamW's master weights and moments are bit-equal. The losses are equal up to the order in which gradients are summed:
over ranks, or over the micro-batches of a rank. AdamW divides a gradient by its own size, so rounding errors of tiny
gradients become steps of the size of the learning rate.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch
from torch import Tensor

from fcsd.config import ResolvedRecipe
from fcsd.distill import loop
from fcsd.distill.run import snapshot
from fcsd.distill.run.report import read_metrics
from fcsd.errors import CheckpointError, ConfigError

FP32 = {"train__dtype": "fp32", "parallel__zero_stage": 1}
BF16 = {"train__dtype": "bf16", "parallel__zero_stage": 2}
DECAY = {"optim__weight_decay": 0.1}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}  # relative, of losses
ODD = {"hidden_size": 15, "head_dim": 8, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 21}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense teacher and its conversion, with an odd number of parameters."""
    folder = tmp_path_factory.mktemp("dense")
    runs.write_models(folder, "llama", **ODD)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    runs.write_models(folder, "qwen3_moe")
    return folder


def recipe(folder: Path, out: Path, **changes: Any) -> ResolvedRecipe:
    common = {"optim__schedule": "constant", "optim__grad_clip": 0.5, "train__micro_batch_size": 1}
    return runs.resolved(folder, output_dir=str(out), **{**common, **changes})


def distill(recipes: list[ResolvedRecipe]) -> None:
    """Runs recipes one after the other. Each rank writes its optimizer's state beside the run before the first step."""
    steps = loop.take_steps

    def write_and_take(run: Any, *arguments: Any) -> None:
        folder = run.directory / "start" / snapshot.OPTIMIZER
        folder.mkdir(parents=True, exist_ok=True)
        snapshot.write_states(snapshot.take(run.training, run.world), folder.parent, run.world.rank)
        steps(run, *arguments)

    loop.take_steps = write_and_take
    for each in recipes:
        loop.distill_model(each)


def whole_state(folder: Path, degree: int = 1) -> dict[str, Tensor]:
    """The flat state of all parameters by kind, and the count of steps: partitions in the order of ranks.

    Args:
        degree: so many neighbouring ranks have experts of their own.
    """
    files = sorted((folder / "optimizer").iterdir(), key=lambda path: int(path.stem.removeprefix("rank-")))
    saved = [torch.load(path, weights_only=False) for path in files]
    if "taken" in saved[0]:
        kept = [kept for _, kept in sorted(saved[0]["state"].items())]
        found = {kind: torch.cat([each[kind].flatten() for each in kept]) for kind in kept[0]}
        return {**found, "step": saved[0]["taken"].float()}
    base = [state.get("base_optimizer_state", state)["state"] for state in saved]
    if "base_optimizer_state" not in saved[0]:  # without ZeRO rank 0 has all
        return {f"{number} {kind}": value for number, kept in base[0].items() for kind, value in kept.items()}
    lists: dict[str, list[Tensor]] = {}
    for number in base[0]:
        # Where the ranks have fewer partitions than there are ranks, each place has parameters of its own.
        experts = saved[0]["partition_count"][number] < len(saved)
        for place in range(degree if experts else 1):
            some = range(place, len(saved), degree if experts else 1)
            paddings = [saved[rank]["group_paddings"][number] for rank in some]
            for kind in ("exp_avg", "exp_avg_sq"):
                values = [base[rank][number][kind] for rank in some]
                whole = [value[: len(value) - padding] for value, padding in zip(values, paddings, strict=True)]
                lists.setdefault(kind, []).extend(whole)
            if "single_partition_of_fp32_groups" in saved[0]:
                masters = [saved[rank]["single_partition_of_fp32_groups"][number] for rank in some]
                lists.setdefault("master", []).extend(masters)
    return {kind: torch.cat(values) for kind, values in lists.items()} | {"step": base[0][0]["step"]}


def compare(folder: Path, tmp: Path, cases: dict[str, dict[str, Any]], sizes: list[tuple[int, int]]) -> None:
    """Runs all cases in the first number of ranks, and goes on after the second step in the second number."""
    for size in sorted({then for then, _ in sizes}):
        ranks.results(size, distill, [recipe(folder, tmp / f"{name}-{size}", **cases[name]) for name in cases])
    for size in sorted({now for _, now in sizes}):
        some = [(name, then) for name in cases for then, now in sizes if now == size]
        cut = [runs.cut_short(tmp / f"{name}-{then}", tmp / f"{name}-{then}-{size}") for name, then in some]
        for out in cut:
            shutil.rmtree(out / "start")
        found = [recipe(folder, out, **cases[name]) for out, (name, _) in zip(cut, some, strict=True)]
        ranks.results(size, distill, found)
    for name, changes in cases.items():
        for then, now in sizes:
            reference, resumed = tmp / f"{name}-{then}", tmp / f"{name}-{then}-{now}"
            degree = changes.get("parallel__ep_size", 1)
            before = whole_state(reference / "checkpoints" / "step-2", degree)
            after = whole_state(resumed / "start", degree)
            assert before.keys() == after.keys() and "step" in "".join(before)
            assert all(torch.equal(before[kind], after[kind]) for kind in before), name
            files = list((resumed / "checkpoints" / "step-4").glob("rank-*.json"))
            assert len(files) == now
            mine, theirs = read_metrics(resumed), read_metrics(reference)
            assert [line["step"] for line in mine] == [1, 2, 3, 4]
            for one, other in zip(mine, theirs, strict=True):
                tolerance = TOLERANCE[changes["train__dtype"]]
                print(name, then, now, one["step"], one["loss"] / other["loss"] - 1)
                assert one["loss"] == pytest.approx(other["loss"], rel=tolerance), f"{name} {then} -> {now}"


def test_fewer_and_more_ranks_go_on_with_the_same_state_and_rows(folder: Path, tmp_path: Path) -> None:
    """In bf16 one process has ``OneProcessAdamW``, and two have ZeRO."""
    compare(folder, tmp_path, {"fp32": FP32, "bf16": {**BF16, **DECAY}}, [(1, 2), (2, 1)])
    moments = whole_state(tmp_path / "fp32-2" / "checkpoints" / "step-2")["exp_avg"]
    assert len(moments) % 2 == 1 and moments.abs().min() == 0 < moments.abs().max()
