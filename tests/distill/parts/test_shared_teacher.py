"""The teacher that is the student with its first weights equals a second model in memory, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
from safetensors.torch import load_file

from fcsd.distill import loop, prepare
from fcsd.distill.run.report import read_metrics

LORA: dict[str, Any] = {"train__adapter": {"rank": 4, "alpha": 8.0}, "train__eval_every": 2, "train__steps": 2}
NORMS = {"optim__train": ["norms", "head", "last:25%"], "optim__weight_decay": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "fp32, stage 1": {"train__micro_batch_size": 1},
    "fp32, stage 2, streams are compared": {
        "parallel__zero_stage": 2,
        "objective__hidden": {"weight": 0.1, "layers": "all"},
        **NORMS,
    },
    "fp32, stage 0, recomputed": {"parallel__zero_stage": 0, "train__activation_checkpointing": True},
    "bf16, stage 1": {"train__dtype": "bf16", **NORMS},
    "bf16, stage 2": {"train__dtype": "bf16", "parallel__zero_stage": 2},
}
# The last two of four layers are converted, and they alone have adapters: the first two are computed once.
LAST = {"init": {"wiring": "farskip", "layers": "last:2"}, "train__adapter": {"rank": 4, "layers": "converted"}}
PREFIX: dict[str, dict[str, Any]] = {
    "prefix, recomputed": {"train__activation_checkpointing": True},
    "prefix, bf16": {"train__dtype": "bf16", "train__micro_batch_size": 1, "optim__train": ["head", "last:1"]},
    "prefix, stage 0": {"parallel__zero_stage": 0, "train__micro_batch_size": 8},
    "streams are compared, no prefix": {"objective__hidden": {"weight": 0.1, "layers": "last:1"}},
}
# Without adapters the converted layers train themselves. Of four layers two are converted, and one or two are shared.
PARTS: dict[str, Any] = {"train__adapter": None, "optim__train": ["converted"], "init": LAST["init"]}
LADDER = {"init": {"wiring": "ladder", "layers": "last:2"}}
ALONE: dict[str, dict[str, Any]] = {
    "parts, bf16, stage 1": {"train__dtype": "bf16", "optim__weight_decay": 0.1},
    "parts, fp32, stage 2, ladder": {"parallel__zero_stage": 2, **LADDER},
    "parts, stage 0, recomputed": {"parallel__zero_stage": 0, "train__activation_checkpointing": True},
    "parts, bf16, stage 2": {
        "train__dtype": "bf16",
        "parallel__zero_stage": 2,
        "optim__train": ["last:50%", "norms", "head"],
    },
    "parts, named layers": {"optim__train": ["2-3"]},
    "parts, streams are compared": {"objective__hidden": {"weight": 0.1, "layers": "all"}},
    "parts, one micro-batch": {"train__micro_batch_size": 4, "train__dtype": "bf16"},
}
# The ranks of Desync are simulated: the projections that return partial sums are the teacher's ordinary ones, too.
DESYNC: dict[str, dict[str, Any]] = {
    "desync, bf16": {"train__dtype": "bf16", "init": {"wiring": "desync-4x", "layers": "last:2", "gpus": 2}},
    "desync, all layers": {"init": {"wiring": "desync-2x", "layers": "all", "gpus": 2}},
}
SHARDED: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "overlapped, stage 2, bf16": {"parallel__zero_stage": 2, "train__dtype": "bf16", **NORMS},
    "overlapped, recomputed": {"train__activation_checkpointing": True, "parallel__zero_stage": 0},
    "blocking": {"parallel__overlap": "off"},
    "deduplicated": {"parallel__dedup": "rank"},
    "only shared experts": {"train__adapter": {"rank": 4, "targets": ["shared_experts"]}},
    "rounded": {"parallel__quantised": {"dispatch": "int8:g32"}},
    "no adapters": {"train__adapter": None, "optim__train": ["self_attn", "shared_experts", "norms", "routers"]},
}


def distill(cases: list[tuple[Any, bool]]) -> None:
    """Trains recipes one after the other, each with a shared or a separate teacher."""
    shares = prepare.shares_weights
    for recipe, separate in cases:
        prepare.shares_weights = (lambda recipe: False) if separate else shares
        loop.distill_model(recipe)


def outcome(run: Path) -> tuple[list[dict[str, str]], Any]:
    """Every loss and norm of a run, to the last bit, and the bytes of its adapters and of the merged model."""
    named = ("loss", "kl", "sft", "hidden", "lr", "grad_norm", "held_out_kl", "held_out_sft", "held_out_hidden")
    numbers = [{key: float(line[key]).hex() for key in named if key in line} for line in read_metrics(run)]
    files = [run / "checkpoints" / "step-2" / "parts" / "parts.safetensors", run / "final" / "model.safetensors"]
    return numbers, [file.read_bytes() for file in files]


def both_ways(folder: Path, out: Path, size: int, cases: dict[str, dict[str, Any]]) -> None:
    """Trains each case with both teachers and compares the runs."""
    recipes = []
    for number, changes in enumerate(cases.values()):
        for separate in (True, False):
            where = str(out / f"{number}-{separate}")
            recipes.append((runs.resolved(folder, output_dir=where, **{**LORA, **changes}), separate))
    ranks.results(size, distill, recipes)
    for number, name in enumerate(cases):
        separate, shared = (outcome(out / f"{number}-{way}") for way in (True, False))
        assert shared[0] == separate[0], name
        assert shared[1] == separate[1], name
        assert any("held_out_kl" in line for line in shared[0]), name


@pytest.mark.parametrize(("size", "names"), [(1, ["fp32, stage 2, streams are compared"]), (2, ["bf16, stage 1"])])
def test_a_shared_teacher_equals_a_separate_one(folder: Path, tmp_path: Path, size: int, names: list[str]) -> None:
    both_ways(folder, tmp_path, size, {name: CASES[name] for name in names})


@pytest.mark.nightly
@pytest.mark.parametrize("size", [1, 2])
def test_a_shared_teacher_equals_a_separate_one_in_every_setting(folder: Path, tmp_path: Path, size: int) -> None:
    both_ways(folder, tmp_path, size, CASES)


@pytest.mark.parametrize(
    "names", [["prefix, recomputed"], pytest.param([*PREFIX], marks=pytest.mark.nightly)], ids=["one", "all"]
)
def test_first_layers_computed_once_are_those_computed_twice(folder: Path, tmp_path: Path, names: list[str]) -> None:
    """Each step has several micro-batches, and each row several documents."""
    model = {"model": str(folder / "teacher"), **LAST}
    both_ways(folder, tmp_path, 1, {name: {**model, **PREFIX[name]} for name in names})


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (1, ["parts, bf16, stage 1"]),
        (2, ["parts, fp32, stage 2, ladder"]),
        pytest.param(1, [*ALONE], marks=pytest.mark.nightly),
        pytest.param(2, [*ALONE], marks=pytest.mark.nightly),
    ],
    ids=["one", "two", "all", "all of two"],
)
def test_parts_that_train_without_adapters_have_a_shared_teacher(
    folder: Path, tmp_path: Path, size: int, names: list[str]
) -> None:
    """The converted layers have routed experts, which train with them."""
    model = {"model": str(folder / "teacher"), **PARTS}
    both_ways(folder, tmp_path, size, {name: {**model, **ALONE[name]} for name in names})


def test_parts_that_train_under_desync_have_a_shared_teacher(tmp_path: Path) -> None:
    runs.write_models(tmp_path / "dense", "llama")
    model = {**PARTS, "model": str(tmp_path / "dense" / "teacher")}
    both_ways(tmp_path / "dense", tmp_path, 1, {name: {**model, **changes} for name, changes in DESYNC.items()})


@pytest.mark.parametrize(
    "names", [["overlapped, stage 2, bf16"], pytest.param([*SHARDED], marks=pytest.mark.nightly)], ids=["one", "all"]
)
def test_a_shared_teacher_equals_a_separate_one_with_divided_experts(
    folder: Path, tmp_path: Path, names: list[str]
) -> None:
    both_ways(folder, tmp_path, 2, {name: {"parallel__ep_size": 2, **SHARDED[name]} for name in names})


@pytest.mark.parametrize("arch", ["qwen2_moe", pytest.param("llama4_text", marks=pytest.mark.nightly)])
def test_divided_experts_have_the_adapters_of_one_process(tmp_path: Path, arch: str) -> None:
    """Also where the shared experts have another name once the experts are divided."""
    runs.write_models(tmp_path, arch)
    changes = {**LORA, "optim__train": ["norms"], "optim__lr": 1e-4}
    runs.train(runs.resolved(tmp_path, output_dir=str(tmp_path / "one"), **changes))
    runs.train(runs.resolved(tmp_path, output_dir=str(tmp_path / "two"), parallel__ep_size=2, **changes), 2)
    one, two = (load_file(tmp_path / run / "final" / "model.safetensors") for run in ("one", "two"))
    assert one.keys() == two.keys()
    assert all((one[name] - two[name]).abs().max() < 1e-5 for name in one)
    for mine, reference in zip(*(read_metrics(tmp_path / run) for run in ("two", "one")), strict=True):
        assert mine["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
