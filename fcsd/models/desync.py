"""Desync: keep only the last of every n reductions (Ladder-Residual §5), as a reference on one device.

Between two kept reductions each of the ``degree`` tensor-parallel ranks reads and extends its own residual. The
reference holds them all: a rank dimension in front of the batch, folded into it while transformers' own attention
and MLP run. A rank owns a contiguous share of the heads and of the MLP's intermediate columns; the row-parallel
projections (``o_proj``, ``down_proj``) therefore return per-rank partial sums. A kept reduction is the all-reduce of
``output + residual / degree``: partial outputs are summed, rank-local residuals averaged.

This file needs torch only and is shipped verbatim in exported checkpoints.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

# Keyword arguments of transformers' layers that have a batch dimension, of full size or of one.
_PER_SEQUENCE = {"attention_mask", "position_ids", "position_embeddings"}


class RankPartialLinear(nn.Linear):
    """A row-parallel projection: ``[degree * batch, seq, in] -> [degree * batch, seq, out]``, one partial a rank."""

    tp_degree: int

    def forward(self, x: Tensor) -> Tensor:
        degree = self.tp_degree
        x = x.view(degree, -1, x.shape[-2], degree, x.shape[-1] // degree)
        own = x.diagonal(dim1=0, dim2=3)  # [batch, seq, in / degree, degree]: each rank's own columns
        weight = self.weight.view(self.out_features, degree, -1)
        return torch.einsum("bsir,ori->rbso", own, weight).flatten(0, 1)


class DesyncLayer(nn.Module):
    """A dense decoder layer on rank-local residuals, mixed in front of transformers' own class.

    The carrier is the mean of the residuals ``[batch, seq, hidden]``, followed, while they differ, by the residuals
    ``[degree * batch, seq, hidden]``.
    """

    tp_degree: int
    keeps: tuple[bool, bool]  # is the reduction after (attention, MLP) kept?
    unwired: type[nn.Module]  # the class to go back to
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def forward(self, hidden_states: Tensor | tuple[Tensor, Tensor], **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(hidden_states, tuple):
            mean, local = hidden_states
        else:
            mean, local = hidden_states, hidden_states.repeat(self.tp_degree, 1, 1)
        for name in _PER_SEQUENCE & kwargs.keys():
            kwargs[name] = _per_rank(kwargs[name], mean.shape[0], self.tp_degree)
        a = self.self_attn(hidden_states=self.input_layernorm(local), **kwargs)[0]
        local = self._add(local, a, keep=self.keeps[0])
        m = self.mlp(self.post_attention_layernorm(local))
        local = self._add(local, m, keep=self.keeps[1])
        ranks = local.unflatten(0, (self.tp_degree, -1))
        return ranks[0] if self.keeps[1] else (ranks.mean(dim=0), local)

    def _add(self, local: Tensor, partial: Tensor, keep: bool) -> Tensor:
        if not keep:
            return local + partial
        reduced = (partial + local / self.tp_degree).unflatten(0, (self.tp_degree, -1)).sum(dim=0)
        return reduced.repeat(self.tp_degree, 1, 1)


def _per_rank(value: Any, batch: int, degree: int) -> Any:
    # A batch dimension follows the folded batch; one of size one broadcasts.
    if isinstance(value, tuple):
        return tuple(_per_rank(item, batch, degree) for item in value)
    if isinstance(value, Tensor) and value.shape[0] == batch > 1:
        return value.repeat(degree, *[1] * (value.dim() - 1))
    return value


def kept_reductions(layers: Sequence[int], group: int) -> dict[int, tuple[bool, bool]]:
    """For each converted layer, whether the reductions after its attention and its MLP are kept.

    Groups of ``group`` consecutive reductions are counted from the start of each unbroken run of layers; a run's
    last reduction is always kept, so what follows it reads one stream.
    """
    keeps, count = {}, 0
    for i in layers:
        count = count if i - 1 in keeps else 0
        last = i + 1 not in layers
        keeps[i] = ((count + 1) % group == 0, (count + 2) % group == 0 or last)
        count += 2
    return keeps


@cache
def _desync_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (DesyncLayer, cls), {"__module__": cls.__module__, "unwired": cls})


def desync_layers(layers: Any, chosen: Sequence[int], group: int, degree: int) -> None:
    """Desync the ``chosen`` dense layers in place.

    Raises:
        ValueError: a chosen layer is not dense, has a biased output projection, or its width does not divide.
    """
    keeps = kept_reductions(chosen, group)
    rows = {i: (layers[i].self_attn.o_proj, layers[i].mlp.down_proj) for i in keeps}
    for i, row in ((i, row) for i, pair in rows.items() for row in pair):
        if row.bias is not None:
            raise ValueError(f"layer {i}: desync needs output projections without bias")
        if row.in_features % degree or layers[i].self_attn.config.num_attention_heads % degree:
            raise ValueError(f"layer {i}: tp_degree {degree} does not divide its heads and {row.in_features} columns")
    for i, keep in keeps.items():
        for row in rows[i]:
            row.__class__, row.tp_degree = RankPartialLinear, degree
        layers[i].__class__ = _desync_class(type(layers[i]))
        layers[i].tp_degree, layers[i].keeps = degree, keep


def undo_desync(layers: Any) -> None:
    """Give desynced layers and their projections back their own classes."""
    for layer in layers:
        if isinstance(layer, DesyncLayer):
            for row in (layer.self_attn.o_proj, layer.mlp.down_proj):
                row.__class__ = nn.Linear
                del row.tp_degree
            del layer.tp_degree, layer.keeps
            layer.__class__ = layer.unwired  # pyright: ignore[reportAttributeAccessIssue]
