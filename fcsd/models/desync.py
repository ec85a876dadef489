"""The reference of Desync on one device: some tensor-parallel reductions of a model are kept, the others dropped.

Ladder-Residual §5. Between two kept reductions each of the ``degree`` tensor-parallel ranks reads and extends its own
residual. The reference holds all of them: it puts a rank dimension in front of the batch dimension and folds the two
into one while transformers' own attention and MLP run. A rank owns a contiguous share of the heads and of the MLP's
intermediate columns, so the row-parallel projections (``o_proj``, ``down_proj``) return one partial sum for each
rank. A kept reduction is the all-reduce of ``output + residual / degree``: it sums the partial outputs and averages the
rank-local residuals.

This file needs torch only and is shipped verbatim in exported checkpoints.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .wiring_block import Blocks

# Keyword arguments of transformers' layers that have a batch dimension, whose size is that of the batch or 1.
_PER_SEQUENCE = {"attention_mask", "position_ids", "position_embeddings"}


class RankPartialLinear(nn.Linear):
    """A row-parallel projection ``[degree * batch, seq, in] -> [degree * batch, seq, out]``: a partial sum per rank."""

    tp_degree: int

    def forward(self, x: Tensor) -> Tensor:
        degree = self.tp_degree
        x = x.view(degree, -1, x.shape[-2], degree, x.shape[-1] // degree)
        own = x.diagonal(dim1=0, dim2=3)  # [batch, seq, in / degree, degree]: each rank's own columns
        weight = self.weight.view(self.out_features, degree, -1)
        return torch.einsum("bsir,ori->rbso", own, weight).flatten(0, 1)


class DesyncLayer(nn.Module):
    """A dense decoder layer on rank-local residuals; a mixin that precedes transformers' own class.

    Layers pass on the mean of the residuals ``[batch, seq, hidden]``. While the residuals of the ranks differ, they
    pass on a tuple of this mean and the residuals ``[degree * batch, seq, hidden]``.
    """

    tp_degree: int
    keeps: tuple[bool, bool]  # whether the reduction after (attention, MLP) is kept
    gets_ranks: bool  # whether the layer before passes on the residuals of the ranks
    unwired: type[nn.Module]  # transformers' class, which ``undo_desync`` restores
    blocks: Blocks
    self_attn: Any
    mlp: Any

    def forward(self, hidden_states: Tensor | tuple[Tensor, Tensor], **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(hidden_states, tuple):
            mean, local = hidden_states
        elif self.gets_ranks:
            raise ValueError(alone("residuals of ranks"))
        else:
            mean, local = hidden_states, hidden_states.repeat(self.tp_degree, 1, 1)
        for name in _PER_SEQUENCE & kwargs.keys():
            kwargs[name] = _per_rank(kwargs[name], mean.shape[0], self.tp_degree)
        if "borders" in kwargs:
            kwargs["borders"] = _borders_per_rank(kwargs["borders"], mean.shape[0] * mean.shape[1], self.tp_degree)
        a = self.self_attn(hidden_states=self.blocks.read(self, "attn", local), **kwargs)[0]
        local = self._add(local, self.blocks.arrive(self, "attn", a), keep=self.keeps[0])
        m = self.mlp(self.blocks.read(self, "mlp", local))
        local = self._add(local, self.blocks.arrive(self, "mlp", m), keep=self.keeps[1])
        ranks = local.unflatten(0, (self.tp_degree, -1))
        return ranks[0] if self.keeps[1] else (ranks.mean(dim=0), local)

    def _add(self, local: Tensor, partial: Tensor, keep: bool) -> Tensor:
        if not keep:
            return local + partial
        reduced = (partial + local / self.tp_degree).unflatten(0, (self.tp_degree, -1)).sum(dim=0)
        return reduced.repeat(self.tp_degree, 1, 1)


def alone(missing: str) -> str:
    """Why a layer refuses one tensor where the layer before it passes on a tuple.

    Tools that calibrate layer by layer keep the first output of a layer. It has the right shape, and a layer that took
    it for all there is would compute the standard wiring or a third function.
    """
    return (
        f"a rewired layer got one tensor without the {missing} that the layer before it passes on: give it the whole "
        "output; tools that keep the first output of each layer, as GPTQModel and AutoRound do, calibrate another "
        "function, so quantise by fcsd export --quantise instead"
    )


def _per_rank(value: Any, batch: int, degree: int) -> Any:
    # A batch dimension is repeated for each rank, as the batch is. One of size 1 broadcasts and stays as it is.
    if isinstance(value, tuple):
        return tuple(_per_rank(item, batch, degree) for item in value)
    if isinstance(value, Tensor) and value.shape[0] == batch > 1:
        return value.repeat(degree, *[1] * (value.dim() - 1))
    return value


def _borders_per_rank(borders: Tensor, tokens: int, degree: int) -> Tensor:
    """Where documents begin in the concatenated rows of all ranks, and their length, for attention that takes borders.

    Args:
        borders: the same for the rows of one rank, ``[documents + 1]``; the last one is ``tokens``.
        tokens: the tokens of the rows of one rank.
    """
    starts = [borders[:-1] + rank * tokens for rank in range(degree)]
    return torch.cat([*starts, borders[-1:] * degree])


@cache
def _desync_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (DesyncLayer, cls), {"__module__": cls.__module__, "unwired": cls})


def desync_layers(layers: Any, blocks: Blocks, keeps: Mapping[int, tuple[bool, bool]], degree: int) -> None:
    """Apply Desync to dense layers, in place.

    Args:
        keeps: as ``wiring_block.kept_reductions`` returns it; its keys are the layers to change.
        degree: the number of tensor-parallel ranks to simulate.

    Raises:
        ValueError: outputs are normed on arrival, an output projection has a bias, or ``degree`` does not divide the
            heads or the columns.
    """
    if blocks.normed:
        raise ValueError("desync has no whole outputs, which the norms of this architecture need")
    rows = {i: _projections(layers[i]) for i in keeps}
    for i, row in ((i, row) for i, pair in rows.items() for row in pair):
        if row.bias is not None:
            raise ValueError(f"layer {i}: desync needs output projections without bias")
        if row.in_features % degree or layers[i].self_attn.config.num_attention_heads % degree:
            raise ValueError(f"layer {i}: tp_degree {degree} does not divide its heads and {row.in_features} columns")
    for i, keep in keeps.items():
        for row in rows[i]:
            row.__class__, row.tp_degree = RankPartialLinear, degree
        layers[i].__class__ = _desync_class(type(layers[i]))
        layers[i].tp_degree, layers[i].keeps, layers[i].blocks = degree, keep, blocks
        layers[i].gets_ranks = i - 1 in keeps and not keeps[i - 1][1]


def _projections(layer: Any) -> tuple[Any, Any]:
    """The linear layers whose outputs are added to the residual: that of the attention, and the last one of the MLP."""
    return layer.self_attn.o_proj, [module for module in layer.mlp.children() if isinstance(module, nn.Linear)][-1]


def undo_desync(layers: Any) -> None:
    """Restore transformers' own classes of Desync layers and torch's class of their projections."""
    for layer in layers:
        if isinstance(layer, DesyncLayer):
            for row in _projections(layer):
                row.__class__ = nn.Linear
                del row.tp_degree
            del layer.tp_degree, layer.keeps, layer.blocks, layer.gets_ranks
            layer.__class__ = layer.unwired  # pyright: ignore[reportAttributeAccessIssue]
