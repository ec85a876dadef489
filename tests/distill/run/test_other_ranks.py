"""Runs go on with another number of ranks: with the same state of the optimizer, the same rows, and the same losses.

AdamW's master weights and moments are bit-equal. The losses are equal up to the order in which gradients are summed:
over ranks, or over the micro-batches of a rank. AdamW divides a gradient by its own size, so rounding errors of tiny
gradients become steps of the size of the learning rate.
"""

import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch
from test_state import cut_first, seal
from torch import Tensor

from fcsd.config import ResolvedRecipe
from fcsd.distill import loop
from fcsd.distill.run import snapshot
from fcsd.distill.run.report import read_metrics
from fcsd.errors import CheckpointError, ConfigError

FP32 = {"train__dtype": "fp32", "parallel__zero_stage": 1}
BF16 = {"train__dtype": "bf16", "parallel__zero_stage": 2}
DECAY = {"optim__weight_decay": 0.1}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}  # relative, of losses
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
    runs.write_models(folder, "deepseek_v2")  # whose routers one process trains in fp32
    return folder


def recipe(folder: Path, out: Path, **changes: Any) -> ResolvedRecipe:
    common = {"optim__schedule": "constant", "optim__grad_clip": 0.5, "train__micro_batch_size": 1}
    common |= {"data__held_out": None}
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


def whole_state(folder: Path, ep_size: int = 1) -> dict[str, Tensor]:
    """The flat state of all parameters by kind, and the count of steps: partitions in the order of ranks.

    Args:
        ep_size: so many neighbouring ranks have experts of their own.
    """
    files = [folder / "optimizer" / f"rank-{rank}.pt" for rank in range(len(list((folder / "optimizer").iterdir())))]
    saved = [torch.load(path, weights_only=False) for path in files]
    if "taken" in saved[0]:  # of OneProcessAdamW
        kept = [kept for _, kept in sorted(saved[0]["state"].items())]
        found = {kind: torch.cat([each[kind].flatten() for each in kept]) for kind in kept[0]}
        return {**found, "step": saved[0]["taken"].float()}
    if "base_optimizer_state" not in saved[0]:  # without ZeRO
        return dict(tensors(saved))
    lists: dict[str, list[Tensor]] = {}
    base = [state["base_optimizer_state"]["state"] for state in saved]
    for number in base[0]:
        places = ep_size if saved[0]["partition_count"][number] < len(saved) else 1
        for rank in sorted(range(len(saved)), key=lambda rank: rank % places):
            padding = saved[rank]["group_paddings"][number]
            for kind in ("exp_avg", "exp_avg_sq"):
                value = base[rank][number][kind]
                lists.setdefault(kind, []).append(value[: len(value) - padding])
            if "single_partition_of_fp32_groups" in saved[0]:
                lists.setdefault("master", []).append(saved[rank]["single_partition_of_fp32_groups"][number])
    return {kind: torch.cat(values) for kind, values in lists.items()} | {"step": base[0][0]["step"]}


def tensors(value: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a nested state."""
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, dict | list | tuple):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors(each, f"{key} {name}")


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
            ep_size = changes.get("parallel__ep_size", 1)
            before = whole_state(reference / "checkpoints" / "step-2", ep_size)
            after = whole_state(resumed / "start", ep_size)
            assert before.keys() == after.keys() and "step" in "".join(before)
            assert all(torch.equal(before[kind], after[kind]) for kind in before), name
            files = list((resumed / "checkpoints" / "step-4").glob("rank-*.json"))
            assert len(files) == now
            mine, theirs = read_metrics(resumed), read_metrics(reference)
            assert [line["step"] for line in mine] == [1, 2, 3, 4]
            for one, other in zip(mine, theirs, strict=True):
                tolerance = TOLERANCE[changes["train__dtype"]]
                assert one["loss"] == pytest.approx(other["loss"], rel=tolerance), f"{name} {then} -> {now}"


def test_fewer_and_more_ranks_go_on_with_the_same_state_and_rows(folder: Path, tmp_path: Path) -> None:
    """In bf16 one process has ``OneProcessAdamW``, and two have ZeRO."""
    compare(folder, tmp_path, {"fp32": FP32, "bf16": {**BF16, **DECAY}}, [(1, 2), (2, 1)])
    moments = whole_state(tmp_path / "fp32-2" / "checkpoints" / "step-2")["exp_avg"]
    assert len(moments) % 2 == 1 and moments.abs().min() == 0 < moments.abs().max()


@pytest.mark.nightly
def test_odd_numbers_of_ranks_and_all_that_may_train(folder: Path, tmp_path: Path) -> None:
    converted = {"model": str(folder / "teacher"), "init": {"wiring": "ladder", "layers": "last:1"}}
    cases: dict[str, dict[str, Any]] = {
        "fp32": {**FP32, **DECAY},
        "fp32, no ZeRO": {**FP32, "parallel__zero_stage": 0},
        "bf16, no ZeRO": {**BF16, "parallel__zero_stage": 0},
        "on the host": {**BF16, "optim__offload": "host"},
        "adapters": {**BF16, **DECAY, "train__adapter": {"rank": 3, "alpha": 8.0}, "optim__train": ["norms"]},
        "converted": {**FP32, **converted, "optim__train": ["converted"]},
        "converted in bf16": {**BF16, **converted, "optim__train": ["converted"]},
    }
    rows = {"train__batch_tokens": 12 * 32}
    cases = {name: {**changes, **rows} for name, changes in cases.items()}
    compare(folder, tmp_path, cases, [(1, 3), (2, 3), (3, 1), (3, 2)])


@pytest.mark.nightly
def test_more_and_fewer_copies_of_experts_go_on(experts: Path, tmp_path: Path) -> None:
    divided = {"parallel__ep_size": 2}
    alone = {"model": str(experts / "teacher"), "init": {"wiring": "farskip", "layers": "last:1"}}
    cases: dict[str, dict[str, Any]] = {
        "fp32": {**FP32, **divided, **DECAY},
        "bf16": {**BF16, **divided},
        "no ZeRO": {**FP32, **divided, "parallel__zero_stage": 0},
        "converted": {**BF16, **divided, **alone, "optim__train": ["converted"]},
        "moving": {**FP32, **divided, "parallel__placement": {"every": 1}},
    }
    compare(experts, tmp_path, cases, [(2, 4), (4, 2)])
    compare(experts, tmp_path, {"whole": BF16}, [(1, 2), (2, 1)])


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_what_cannot_go_on_changes_nothing_and_names_the_reason(folder: Path, tmp_path: Path) -> None:
    runs.train(recipe(folder, tmp_path / "run", **FP32), 2)
    run = runs.cut_short(tmp_path / "run", tmp_path / "cut")
    before = contents(run)
    with pytest.raises(ConfigError, match=r"is no multiple of .* processes = 96") as caught:
        runs.train(recipe(folder, run, **FP32), 3)
    assert "another number of processes" in str(caught.value.hint)
    assert contents(run) == before

    checkpoint = run / "checkpoints" / "step-2"
    file = checkpoint / "optimizer" / "rank-1.pt"
    whole, other = file.read_bytes(), (checkpoint / "optimizer" / "rank-0.pt").read_bytes()

    def refused(data: bytes | None, sealed: bool, reason: str) -> None:
        file.unlink()
        if data is not None:
            file.write_bytes(data)
        if sealed:
            seal(checkpoint)
        with pytest.raises(CheckpointError, match=reason) as caught:
            loop.distill_model(recipe(folder, run, **FP32), resume=str(checkpoint))
        assert "\n" not in str(caught.value)

    short = BytesIO()
    torch.save(cut_first(torch.load(file, weights_only=False), "exp_avg"), short)
    refused(whole[:-1], False, r"optimizer/rank-1\.pt has the wrong size")
    refused(None, False, r"optimizer/rank-1\.pt is missing")
    file.touch()
    refused(whole[: len(whole) // 2], True, r"optimizer/rank-1\.pt: cannot be read")
    refused(short.getvalue(), True, r"optimizer: does not hold .*: rank-1\.pt has exp_avg of shape \[1\] for ")
    refused(other, True, r"optimizer: does not hold the state of this optimizer")
