"""Training with quantised rows: neither the schedule nor a resume changes a bit; bad recipes are refused early."""

from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch
from runs import outcome

from fcsd.distill import loop
from fcsd.distill.preview import preview
from fcsd.distill.run.identity import run_identity
from fcsd.distill.run.report import read_metrics
from fcsd.distill.student import check
from fcsd.errors import ConfigError
from fcsd.launch.world import World
from fcsd.plan import plan_run
from fcsd.plan.setup import Hardware

WIRE = {"dispatch": "int8:g64", "combine": "int8:g64", "dispatch_grad": "int8:g64", "combine_grad": "int5:g16"}
STEPS = {"train__steps": 2, "optim__horizon": 2}
ROUNDED = {"parallel__quantised": WIRE, **STEPS}
DIVIDED = {"parallel__ep_size": 2}


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directories of several runs in two processes; the one called ``resumed`` stops after one of two steps."""
    out = tmp_path_factory.mktemp("runs")
    _run(
        folder,
        out,
        [
            ("plain", {**DIVIDED, **STEPS}),
            ("whole", {**DIVIDED, **ROUNDED}),
            ("resumed", {**DIVIDED, **ROUNDED, "train__steps": 1}),
            ("resumed", {**DIVIDED, **ROUNDED, "parallel__overlap": "off"}),
            ("simulated", ROUNDED),
        ],
    )
    return out


def _run(folder: Path, out: Path, cases: list[tuple[str, dict[str, Any]]]) -> None:
    runs.train_all([runs.resolved(folder, output_dir=str(out / name), **changes) for name, changes in cases], 2)


def test_neither_the_schedule_nor_a_resume_changes_a_bit(found: Path) -> None:
    assert outcome(found / "resumed") == outcome(found / "whole")
    assert outcome(found / "whole") != outcome(found / "plain")


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 2])
def test_a_resume_of_a_simulated_wire_changes_no_bit(folder: Path, tmp_path: Path, stage: int) -> None:
    recipe = {**ROUNDED, "parallel__zero_stage": stage}
    _run(folder, tmp_path, [("whole", recipe), ("resumed", {**recipe, "train__steps": 1}), ("resumed", recipe)])
    assert outcome(tmp_path / "resumed") == outcome(tmp_path / "whole")


def test_one_process_for_all_experts_rounds_as_divided_experts_do(found: Path) -> None:
    plain, divided, simulated = (read_metrics(found / name) for name in ("plain", "whole", "simulated"))
    for exact, one, other in zip(plain, divided, simulated, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert abs(exact["loss"] - one["loss"]) < 0.05 * exact["loss"]


def test_metrics_have_the_bytes_on_the_wire(found: Path) -> None:
    plain, divided, simulated = (read_metrics(found / name) for name in ("plain", "whole", "simulated"))
    for exact, rounded in zip(plain, divided, strict=True):
        # Half of all bytes are the teacher's two exchanges or less; the student's four shrink by 4 * 64 / 96 at least.
        assert 0.4 * exact["wire_bytes"] < rounded["wire_bytes"] < 0.7 * exact["wire_bytes"]
        assert 64 < exact["fullest_rank_rows"] <= 256  # of 2 * 64 tokens with two experts each
    assert all("wire_bytes" not in line for line in simulated)


def test_only_a_wire_that_rounds_is_part_of_the_identity(folder: Path) -> None:
    world: Any = World(0, 1, torch.device("cpu"), None)

    def identity(**changes: Any) -> dict[str, object]:
        recipe = runs.resolved(folder, **changes).recipe
        return {key: value for key, value in run_identity(recipe, [], world).items() if "quantised" in key}

    assert identity() == {}
    assert identity(parallel__quantised=WIRE)["parallel.quantised.combine_grad"] == "int5:g16"


def test_what_cannot_be_rounded_is_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    for arch in ("gpt_oss", "llama"):
        tiny.model(arch).save_pretrained(tmp_path / arch)
    for message, changes in [
        ("groups of format int8 do not divide rows of 64 values", {"parallel__quantised": {"dispatch": "int8"}}),
        ("dispatch_grad: the scales of .* cannot express", {"parallel__quantised": {"dispatch_grad": "int3:g64:sr"}}),
        ("gpt_oss cannot be expert-parallel", {"parallel__quantised": WIRE, "model": str(tmp_path / "gpt_oss")}),
        ("llama cannot be expert-parallel: it has no", {"parallel__quantised": WIRE, "model": str(tmp_path / "llama")}),
    ]:
        for divided in ({}, DIVIDED):
            recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), **divided, **changes)
            with pytest.raises(ConfigError, match=message):
                check(recipe.recipe, 2)
            with pytest.raises(ConfigError, match=message):
                loop.distill_model(recipe, dry_run=True, processes=2)
            with pytest.raises(ConfigError, match=message):
                plan_run(recipe.recipe, Hardware(2))
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prints_the_bits_of_each_direction(folder: Path) -> None:
    wire = {"dispatch": "int8:g64", "combine_grad": "int4:g32"}
    shown = "dispatch int8:g64 (8.5 bits a value), combine_grad int4 (5 bits a value)"
    assert f"\nformats     {shown}\n" in preview(runs.resolved(folder, parallel__quantised=wire).recipe)


def test_compiled_layers_cannot_round(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.compile cannot be combined with .*parallel\.quantised"):
        runs.resolved(folder, parallel__quantised=WIRE, train__compile=True, train__dtype="bf16")
