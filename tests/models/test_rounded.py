"""Linear layers that compute with INT4 weights: the values, their gradients, and what is refused."""

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fcsd.errors import ConfigError
from fcsd.models.build import decoder_layers
from fcsd.models.rounded import compute_rounded, linears, round_weights, to_int4
from fcsd.models.wiring import Wiring


def _nearest(row: list[float], group: int) -> list[float]:
    """Each value of a row as the nearest of the 16 multiples of its group's step; the slow way."""
    found = []
    for start in range(0, len(row), group):
        step = max(map(abs, row[start : start + group])) / 7.5
        table = [code * step for code in range(-8, 8)]
        found += [min(table, key=lambda near: abs(near - value)) for value in row[start : start + group]]
    return found


@pytest.mark.parametrize("group", [32, 64])
def test_weights_become_the_nearest_of_sixteen_multiples_of_a_step(group: int) -> None:
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    weight[0, :64] = 0.0
    found = to_int4(weight, group)
    nearest = torch.tensor([_nearest(row, group) for row in weight.tolist()])
    assert torch.allclose((found - weight).abs(), (nearest - weight).abs(), atol=1e-6)  # two codes may be as near
    assert (found[0, :64] == 0).all() and (found - weight).abs().max() > 0.1
    assert to_int4(weight.bfloat16(), group).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_computes_rounded_is_the_model_with_rounded_weights(dtype: torch.dtype) -> None:
    model, other = (tiny.model("qwen3", initializer_range=0.2).to(dtype) for _ in range(2))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = tiny.tokens(batch=2, length=9)
    plain = model(ids).logits
    compute_rounded(model, "int4:g16")
    round_weights(other, "int4:g16")
    assert torch.equal(model(ids).logits, other(ids).logits) and not torch.equal(other(ids).logits, plain)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    rounded = {f"model.layers.{name}.weight" for name in linears(model, "int4:g16")}
    for name, weight in other.state_dict().items():
        assert (name in rounded) == (".layers." in name and weight.ndim == 2)
        assert torch.equal(weight, to_int4(before[name], 16) if name in rounded else before[name])


def test_the_gradient_of_a_weight_is_that_of_its_rounded_value() -> None:
    model: Any = tiny.model("llama", initializer_range=0.2)
    compute_rounded(model, "int4:g32")
    layer: nn.Linear = decoder_layers(model)[0].mlp.down_proj
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(1), requires_grad=True)
    layer(x).square().sum().backward()
    assert layer.weight.grad is not None and x.grad is not None
    rounded, given = to_int4(layer.weight.detach(), 32).requires_grad_(), x.detach().requires_grad_()
    linear(given, rounded).square().sum().backward()
    own: tuple[Tensor, Tensor] = (layer.weight.grad, x.grad)
    assert torch.equal(own[0], rounded.grad) and torch.equal(own[1], given.grad)  # pyright: ignore[reportArgumentType]


def test_what_is_not_proven_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"groups of 128 do not divide the 64 inputs of layer 0\.self_attn\.q_proj"):
        compute_rounded(tiny.model("llama"), "int4:g128")
    with pytest.raises(ConfigError, match="dense models: no experts are rounded"):
        round_weights(tiny.model("qwen3_moe"), "int4:g32")
    desync: Any = tiny.model("llama")
    desync.config.fcsd = Wiring("desync-2x", (0, 1, 2, 3), tp_degree=2).to_block()
    with pytest.raises(ConfigError, match="not proven with Desync"):
        compute_rounded(desync, "int4:g32")
