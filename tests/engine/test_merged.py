"""Merged projections give the results of the layers that they stand for."""

from typing import Any

import pytest
import tiny
import torch
from representatives import representatives
from torch import nn

from fcsd.engine import fused
from fcsd.engine.fused import TOGETHER, First, Next, merge_projections


@torch.no_grad()
@pytest.mark.parametrize("arch", representatives("attention", "mlp"))
def test_every_architecture_asks_for_the_results_in_their_order(arch: str) -> None:
    model: Any = tiny.model(arch, initializer_range=0.1)
    ids = tiny.tokens(batch=2, length=9)
    expected = model(ids, use_cache=False).logits
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is nn.Linear}
    merge_projections(model)
    for _ in range(2):
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=0, atol=2e-5)
    firsts = [module for module in model.modules() if isinstance(module, First)]
    assert (not firsts) == (arch == "phi3") and all(first.others == [] for first in firsts), (
        "every result was asked for once"
    )
    replaced = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, First | Next)}
    for names in TOGETHER:  # latent attention has other projections, some MLPs have no gate, and phi3 one layer for all
        assert (replaced >= {*names}) == (linear >= {*names})


@torch.no_grad()
def test_biases_are_merged_and_layers_with_a_bias_beside_ones_without_are_left() -> None:
    torch.manual_seed(0)
    for biases in ((True, True), (False, False), (True, False)):
        parent = nn.Module()
        parent.gate_proj, parent.up_proj = (
            nn.Linear(6, width, bias) for width, bias in zip((5, 3), biases, strict=True)
        )
        x = torch.randn(2, 4, 6)
        expected = parent.gate_proj(x), parent.up_proj(x)
        merge_projections(parent)
        assert isinstance(parent.gate_proj, First) == (biases[0] == biases[1])
        for found, wanted in zip((parent.gate_proj(x), parent.up_proj(x)), expected, strict=True):
            torch.testing.assert_close(found, wanted)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_many_tokens_are_multiplied_by_each_weight_by_itself(bias: bool) -> None:
    torch.manual_seed(0)
    parent = nn.Module()
    parent.gate_proj, parent.up_proj = nn.Linear(6, 5, bias), nn.Linear(6, 3, bias)
    x = torch.randn(1, fused._FEW + 1, 6)
    expected = parent.gate_proj(x), parent.up_proj(x)
    merge_projections(parent)
    found = parent.gate_proj(x), parent.up_proj(x)
    assert all(map(torch.equal, found, expected)) and all(part.is_contiguous() for part in found)
    few = parent.gate_proj(x[:, 1:]), parent.up_proj(x[:, 1:])
    assert not any(part.is_contiguous() for part in few), "one product has computed both"
