"""Lets fewer kernels compute a model that serves, with the same results up to rounding.

Projections of one input become one product: query, key and value of an attention, gate and up of a gated MLP. One
product with more columns keeps more multiprocessors busy than several small ones, and starts fewer kernels. In a
decoding step of few tokens, keys and values have so few columns that each of their products leaves most of a GPU idle.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from fcsd.models.build import arch_of
from fcsd.models.fused import fuse_parts

# Names of linear layers that transformers calls one after the other, in this order, with the same input.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# Tokens up to which there is one product. Its results are not contiguous, and with many tokens that costs time.
_FEW = 1024


class First(nn.Module):
    """Stands for the first of several linear layers with one input. It computes the results of all of them."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        weights = [layer.weight.detach() for layer in layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.widths = [layer.out_features for layer in layers]
        self.others: list[Tensor] = []  # results that the other layers have not been asked for yet

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> the result of the first layer, ``[..., its width]``."""
        if x.shape[:-1].numel() > _FEW:
            weights = self.weight.split(self.widths)
            biases = [None] * len(weights) if self.bias is None else self.bias.split(self.widths)
            results = [functional.linear(x, *own) for own in zip(weights, biases, strict=True)]
        else:
            results = functional.linear(x, self.weight, self.bias).split(self.widths, dim=-1)
        first, *self.others = results
        return first


class Next(nn.Module):
    """Stands for another one of these layers. It hands out what ``First`` has computed for it."""

    def __init__(self, first: First) -> None:
        super().__init__()
        self.first = [first]  # in a list, so that it is no child of this module

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is the input that ``First`` has had."""
        return self.first[0].others.pop(0)


def merge_projections(model: nn.Module) -> None:
    """Replaces linear layers that have one input. The weights of each group become one tensor.

    The results are the same up to rounding, because a product with other dimensions may add up in another order. The
    names of the weights change, so the model cannot be saved afterwards.
    """
    for parent in [*model.modules()]:
        for names in TOGETHER:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            if (
                not all(type(layer) is nn.Linear for layer in layers)
                or len({layer.bias is None for layer in layers}) > 1
            ):
                continue
            first = First(layers)
            setattr(parent, names[0], first)
            for name in names[1:]:
                setattr(parent, name, Next(first))


def fuse(model: PreTrainedModel, kernels: bool) -> None:
    """Merge projections, and let kernels compute the parts of ``fuse_parts``.

    The names of the weights change, so the model cannot be saved afterwards.

    Args:
        kernels: whether the model is on a GPU. If not, only projections are merged.
    """
    merge_projections(model)
    fuse_parts(model, arch_of(model.config), kernels)
