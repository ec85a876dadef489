"""Gated MLPs whose product one kernel computes are transformers' own up to rounding, and their classes come back."""

import pytest
import tiny
import torch
from kernel_device import DEVICE
from representatives import representatives
from test_norms import run
from torch import nn
from transformers.activations import SiLUActivation

from fcsd.models.build import unwired, wire
from fcsd.models.fused import FusedMLP, fuse_mlps

SILU, DROPOUT = (nn.SiLU, SiLUActivation), "residual_dropout"
LENGTH = 4  # the interpreter runs one program after the other for each token


def gated_mlps(model: nn.Module) -> list[nn.Module]:
    """The MLPs that have a gate and SiLU. Experts are no such modules, and an MLP with dropout computes more."""
    gated = [module for module in model.modules() if isinstance(getattr(module, "gate_proj", None), nn.Linear)]
    more = (DROPOUT, "limit")
    silu = [one for one in gated if isinstance(getattr(one, "act_fn", None), SILU)]
    return [one for one in silu if not any(hasattr(one, name) for name in more)]


@pytest.mark.parametrize("arch", representatives("mlp"))
def test_a_model_with_fused_mlps_computes_the_same_and_becomes_itself_again(arch: str) -> None:
    model = tiny.model(arch)
    classes, expected = [type(module) for module in model.modules()], run(model, LENGTH)
    gated = gated_mlps(model.to(DEVICE))
    for _ in range(2):
        fuse_mlps(model)
        assert any(isinstance(module, FusedMLP) for module in model.modules()) == (len(gated) > 0)
    if DEVICE == "cpu":
        for fused, own in zip(run(model, LENGTH), expected, strict=True):
            # A decay may have almost no gradient.
            assert (fused - own).norm() <= 1e-5 * own.norm() + 1e-7
    wire(model.to("cpu"), unwired())
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(again, own) for again, own in zip(run(model, LENGTH), expected, strict=True))


def test_a_compiler_sees_the_code_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 64)
    expected = mlp(x)
    fuse_mlps(model)
    assert isinstance(mlp, FusedMLP) and not torch.equal(expected, torch.zeros_like(expected))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(mlp(x), expected)


def test_another_activation_is_left_alone() -> None:
    model = tiny.model("llama", hidden_act="gelu")
    fuse_mlps(model)
    assert not any(isinstance(module, FusedMLP) for module in model.modules())
    assert any(isinstance(module, nn.GELU) or "GELU" in type(module).__name__ for module in model.modules())
