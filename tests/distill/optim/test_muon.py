"""Muon: the update of torch's Muon; a step that is not finite changes nothing; a run resumes to the last bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch
from torch import nn

from fcsd.config.batch import accumulation
from fcsd.distill import loop
from fcsd.distill.optim.adamw_one_process import OneProcessAdamW
from fcsd.distill.optim.muon import OneProcessMuon, muon_groups
from fcsd.errors import ConfigError

SETTINGS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Decoder(nn.Module):
    """Matrices of two shapes, a stack of experts, a convolution and a norm in a layer, and an embedding outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer: dict[str, Any] = {"high": (12, 8), "wide": (8, 24), "again": (12, 8), "experts": (3, 8, 12)}
        layer |= {"conv": (6, 1, 4), "norm": (8,)}
        self.layers = nn.ModuleList([nn.ParameterDict({name: torch.randn(size) for name, size in layer.items()})])
        self.embed = nn.Parameter(torch.randn(10, 8))


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()


def stepped(student: nn.Module, make: Any, steps: int = 3) -> dict[str, torch.Tensor]:
    """The weights after some steps with gradients that depend on the number of the step alone."""
    optimizers = make(student)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in student.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in student.named_parameters()}


def ours(student: nn.Module) -> list[Any]:
    return [OneProcessMuon(muon_groups(student, list(student.parameters())), **SETTINGS, grad_clip=0.0)]


def torchs(student: Any) -> list[Any]:
    """torch's Muon for matrices alone, and the AdamW of one process for what ours gives to it."""
    layer = student.model.layers[0]
    matrices = [layer[name] for name in ("high", "wide", "again")]
    others = [layer["conv"], layer["norm"], student.model.embed]
    settings = {"momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(matrices, lr=SETTINGS["lr"], weight_decay=SETTINGS["weight_decay"], **settings)
    return [muon, OneProcessAdamW(others, **SETTINGS, grad_clip=0.0)]


def test_the_update_is_that_of_torchs_muon_and_of_adamw_elsewhere() -> None:
    before = {name: parameter.detach().clone() for name, parameter in Student().named_parameters()}
    found, expected = stepped(Student(), ours), stepped(Student(), torchs)
    for name, value in expected.items():
        if name.endswith("experts"):
            continue
        change = value - before[name]
        assert (found[name] - value).norm() < 0.02 * change.norm(), name  # products of Muon are rounded to bf16


def test_experts_are_updated_one_by_one() -> None:
    stacked, alone = Student(), Student()
    experts: Any = alone.model.layers[0]
    experts["experts"] = nn.Parameter(experts["experts"][:1].detach().clone())
    for student in (stacked, alone):
        for parameter in student.parameters():
            parameter.grad = torch.ones_like(parameter)
        ours(student)[0].step()
    torch.testing.assert_close(stacked.model.layers[0]["experts"][:1], experts["experts"])


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    student = Student()
    (optimizer,) = ours(student)
    for value in (1.0, float("nan")):
        before = [parameter.detach().clone() for parameter in student.parameters()]
        for parameter in student.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        same = [torch.equal(a, b) for a, b in zip(before, student.parameters(), strict=True)]
        assert all(same) if value != value else not any(same)
    assert optimizer.taken == 1
    assert all(state["exp_avg"].isfinite().all() for state in optimizer.state.values())


def repeat_last_step(resolved: Any) -> None:
    """Trains a recipe of two steps, takes the last away and continues."""
    loop.distill_model(resolved)
    out = Path(resolved.recipe.output_dir)
    shutil.copytree(out, out.with_suffix(".whole"))
    for removed in ("final", "checkpoints/step-2"):
        shutil.rmtree(out / removed)
    loop.distill_model(resolved)


def test_a_run_with_muon_learns_and_resumes_to_the_last_bit(tmp_path: Path) -> None:
    runs.write_models(tmp_path, "llama")
    changes = {"train__dtype": "bf16", "train__steps": 2, "checkpoint__every_steps": 1, "optim__schedule": "constant"}
    results = {}
    for kind in ("muon", "adamw"):
        resolved = runs.resolved(tmp_path, output_dir=str(tmp_path / kind), optim__kind=kind, **changes)
        ranks.on_ranks(1, repeat_last_step, resolved)
        results[kind] = runs.outcome(tmp_path / kind)
        assert results[kind] == runs.outcome(tmp_path / f"{kind}.whole"), "resumed to the last bit"
    assert results["muon"] != results["adamw"]


def test_muon_is_refused_where_it_is_not_proven(tmp_path: Path) -> None:
    runs.write_models(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"optim.kind muon cannot be combined with train.dtype fp32"):
        runs.resolved(tmp_path, optim__kind="muon", train__dtype="fp32")
    recipe = runs.resolved(tmp_path, optim__kind="muon", train__dtype="bf16").recipe
    with pytest.raises(ConfigError, match="needs one process, and this run has 2"):
        accumulation(recipe, 2)
