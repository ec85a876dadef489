"""Computes the weight gradients of a sub-block's first products behind the start of its input gradient's sum.

Autograd's node of a product computes both gradients, so a sum of input gradients would start when the weight gradients
are computed, too. Here each product has two nodes (Megatron-LM hides the same sum in the same way). ``_Product``
computes the gradient of its input, and passes that of its output on to ``_WeightGradient``, whose place in the backward
pass (``order``) is behind the start of the sum and before the place where the sum is awaited.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from fcsd.models.build import arch_of
from fcsd.models.fused import swap_classes
from fcsd.parallel import order
from fcsd.parallel.tensor.tp_plan import Shard, model_shardings


class ColumnLinear(nn.Linear):
    """A column-parallel product; a mixin that precedes torch's own class.

    Attributes:
        place: where the gradient of the weight is computed, from ``order.mark``; None for autograd's own order.
    """

    unfused: type[nn.Module]
    place: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, where ``out`` are this rank's columns."""
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return linear(input, self.weight, self.bias)
        carrier = _WeightGradient.apply(self.weight, input.detach())
        order.run_at(carrier, self.place)
        return _Product.apply(input, self.weight.detach(), self.bias, carrier)


class _WeightGradient(torch.autograd.Function):
    """Returns a tensor without values, whose gradient is that of the product ``[..., out]``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return weight.new_empty(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, carrier: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.biased = bias is not None
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor]:
        (weight,) = ctx.saved_tensors
        grad = grad.contiguous()  # once for both products
        found = grad @ weight if ctx.needs_input_grad[0] else None
        return found, None, grad.flatten(0, -2).sum(0) if ctx.biased else None, grad


def split_products(model: PreTrainedModel) -> None:
    """Let ``ColumnLinear`` compute the column-parallel products of the decoder layers. The call can be repeated."""
    shardings = model_shardings(model, arch_of(model.config), "whole")
    chosen = {
        id(module)
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, ColumnLinear))
        and isinstance(sharding := shardings.get(f"{name}.weight"), Shard)
        and sharding.dim == 0
    }
    swap_classes(model, ColumnLinear, lambda module: id(module) in chosen, True)


def compute_weights_at(part: nn.Module, place: int | None) -> None:
    """Let the weight gradients of a sub-block that is about to be computed be computed at a place of ``order``."""
    for module in part.modules():
        if isinstance(module, ColumnLinear):
            module.place = place
