"""Divides row-parallel products among simulated ranks: each rank computes a partial sum (Megatron-LM, section 3).

The output projection of attention and the down projections of MLPs and experts are row-parallel. The rank holds a
slice of the input dimension, and the sum of all ranks' outputs is the product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fcsd.errors import ConfigError


class PartialSums(nn.Module):
    """A linear layer that returns what every rank computes: ``[..., in] -> [ranks, ..., out]``.

    A bias is added on the first rank alone.

    Raises:
        ConfigError: the ranks do not divide the input dimension.
    """

    def __init__(self, linear: nn.Linear, ranks: int) -> None:
        super().__init__()
        require_divides(ranks, linear.in_features, "input values of a row-parallel product")
        self.linear, self.ranks = linear, ranks

    def forward(self, x: Tensor) -> Tensor:
        pieces = zip(x.chunk(self.ranks, dim=-1), self.linear.weight.chunk(self.ranks, dim=1), strict=True)
        sums = [F.linear(values, weight) for values, weight in pieces]
        if self.linear.bias is not None:
            sums[0] = sums[0] + self.linear.bias
        return torch.stack(sums)


def require_divides(ranks: int, count: int, what: str) -> None:
    """Refuse a tensor-parallel degree that does not divide ``count``.

    Raises:
        ConfigError: it does not.
    """
    if count % ranks:
        raise ConfigError(f"--tp-degree {ranks} does not divide the {count} {what}", "choose one that does")


def expert_slices(experts: nn.Module, ranks: int, transposed: bool) -> list[dict[str, Tensor]]:
    """The weights of the routed experts that each rank holds, by name: a slice of every expert's inner dimension.

    Args:
        experts: transformers' module, with ``gate_up_proj [experts, 2 * inner, hidden]`` and ``down_proj [experts,
            hidden, inner]``.
        transposed: whether the last two dimensions of both weights are exchanged (llama4).

    Raises:
        ConfigError: the ranks do not divide the inner dimension.
    """
    weights: Any = experts
    down, inner_dim = weights.down_proj.detach(), 1 if transposed else 2
    require_divides(ranks, down.shape[inner_dim], "inner values of the experts")
    gate, up = weights.gate_up_proj.detach().chunk(2, dim=3 - inner_dim)
    parts = (tensor.chunk(ranks, dim=3 - inner_dim) for tensor in (gate, up))
    return [
        {"gate_up_proj": torch.cat([g, u], dim=3 - inner_dim), "down_proj": d.contiguous()}
        for g, u, d in zip(*parts, down.chunk(ranks, dim=inner_dim), strict=True)
    ]


def expert_sums(experts: nn.Module, slices: list[dict[str, Tensor]], *inputs: Tensor) -> Tensor:
    """What transformers' experts return on each rank: ``[ranks, *shape of their output]``."""
    return torch.stack([functional_call(experts, held, inputs) for held in slices])
