"""Rounds the weights of linear layers to INT4: in a student's passes, so that it heals with them, and in a model.

A group of neighbouring inputs has one step, of which a weight is -8 to 7. The largest value of a group is 7.5 steps, as
in the symmetric formats of compressed-tensors, and a step has the dtype of the weight. The gradient of a weight is that
of its rounded value (straight-through, Bengio et al. 2013).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..errors import ConfigError
from .build import arch_of, decoder_layers, wiring_of
from .class_swap import with_mixin
from .wiring_block import DESYNC

_LEAST = 1e-30  # a step, also of zeros


def group_of(format: str) -> int:
    """The inputs of a group of a format such as ``int4:g64``, which a recipe has checked."""
    return int(format.removeprefix("int4:g"))


def to_int4(weight: Tensor, group: int) -> Tensor:
    """A weight ``[out, in]`` rounded to -8 to 7 steps, by a step for each ``group`` of inputs; of the same dtype."""
    groups = weight.float().unflatten(-1, (-1, group))
    step = (groups.abs().amax(-1, keepdim=True) / 7.5).clamp(min=_LEAST).to(weight.dtype).float()
    return ((groups / step).round().clamp(-8, 7) * step).flatten(-2).to(weight.dtype)


class _Rounded(torch.autograd.Function):
    """``to_int4`` with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: int) -> Tensor:
        return to_int4(weight, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class RoundedLinear(nn.Linear):
    """A linear layer ``[..., in] -> [..., out]`` that computes with its weight rounded; a mixin."""

    group: int

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = _Rounded.apply(self.weight, self.group)
        return linear(x, weight, self.bias)


def compute_rounded(model: nn.Module, format: str) -> None:
    """Let the linear layers in a model's decoder layers compute with rounded weights. The weights stay as they are.

    Raises:
        ConfigError: see ``linears``.
    """
    for layer in linears(model, format).values():
        layer.__class__ = with_mixin(RoundedLinear, nn.Linear, group=group_of(format))


@torch.no_grad()
def round_weights(model: nn.Module, format: str) -> None:
    """Round the weights of the same layers, in place.

    Raises:
        ConfigError: see ``linears``.
    """
    for layer in linears(model, format).values():
        layer.weight.copy_(to_int4(layer.weight, group_of(format)))


def linears(model: Any, format: str) -> dict[str, nn.Linear]:
    """The linear layers in a model's decoder layers, by name.

    Raises:
        ConfigError: the model has experts or is wired by Desync, or a layer's inputs are not whole groups.
    """
    if not arch_of(model.config).dense:
        raise ConfigError(f"{format} is for dense models: no experts are rounded", "Set train.weight_format: null.")
    if wiring_of(model.config).name in DESYNC:
        raise ConfigError(f"{format} is not proven with Desync", "Set train.weight_format: null.")
    found, group = {}, group_of(format)
    for name, layer in decoder_layers(model).named_modules():
        if type(layer) is nn.Linear or isinstance(layer, RoundedLinear):
            if layer.in_features % group:
                raise ConfigError(
                    f"groups of {group} do not divide the {layer.in_features} inputs of layer {name}",
                    "Choose smaller groups, or train.weight_format: null.",
                )
            found[name] = layer
    return found
