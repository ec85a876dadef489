"""Counts the rows that dispatch sends in each layer, with and without deduplication, for the routing of one pass."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from fcsd.distill.train_engine import TrainEngine
from fcsd.parallel.expert.autoep import expert_blocks
from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.expert.levels import Levels, all_groups, one_level, row_matrices, two_levels


def measure(engine: TrainEngine, model: PreTrainedModel, ids: Tensor, node_size: int | None) -> dict[str, list[float]]:
    """The rows that dispatch sends from one rank to another, divided by the number of tokens, on average over layers.

    Combine and the gradients of both send as many. Every rank must call this.

    Args:
        engine: runs a forward pass of ``model`` on ``ids``.
        node_size: neighbouring ranks that form a node; None counts no nodes.

    Returns: for ``off``, ``rank`` and, with a node size, ``node``: the rows of each level, from the outermost one.
    """
    found: list[dict[str, list[int]]] = []
    blocks = list(expert_blocks(model).values())
    chosen: list[Tensor] = []

    def note(block: ExpertBlock, _router: Any, _inputs: Any, routing: Any) -> None:
        chosen.append(block.placement.positions(routing[1]))

    hooks = [block.router.register_forward_hook(partial(note, block)) for block in blocks]
    try:
        with torch.no_grad():
            engine(ids)
    finally:
        for hook in hooks:
            hook.remove()
    for block, positions in zip(blocks, chosen, strict=True):
        ranks, experts = block.placement.ranks, block.placement.experts
        everyone = [torch.empty_like(positions) for _ in range(ranks)]
        dist.all_gather(everyone, positions.contiguous(), group=block.group)
        together = torch.stack(everyone)
        levels: dict[str, Levels] = {"rank": one_level(ranks)}
        if node_size is not None:
            levels["node"] = two_levels(ranks, node_size)
        rows = {name: rows_sent(together, experts, each) for name, each in levels.items()}
        found.append({"off": [pairs_sent(together, experts, ranks)], **rows})
    tokens = ids.numel() * dist.get_world_size() * len(found)
    return {
        name: [sum(layer[name][level] for layer in found) / tokens for level in range(len(found[0][name]))]
        for name in found[0]
    }


def rows_sent(positions: Tensor, experts: int, levels: Levels) -> list[int]:
    """How many rows travel from one rank to another at each level, in one direction and over all ranks.

    Args:
        positions: ``[ranks, tokens, top_k]``, the positions of the experts that each rank's tokens chose.
    """
    matrices = row_matrices(all_groups(positions, experts, levels), levels)
    return [int(matrix.sum() - matrix.diagonal().sum()) for matrix in matrices]


def pairs_sent(positions: Tensor, experts: int, ranks: int) -> int:
    """How many rows travel from one rank to another without deduplication: one for each pair of token and expert.

    Args:
        positions: ``[ranks, tokens, top_k]``, the positions of the experts that each rank's tokens chose.
    """
    senders = torch.arange(ranks, device=positions.device).view(-1, 1, 1)
    return int((positions // (experts // ranks) != senders).sum())


def to_text(rows: dict[str, list[float]]) -> str:
    """Formats the result of ``measure`` in one line."""
    parts = [f"{name} {' + '.join(f'{count:.3f}' for count in counts)}" for name, counts in rows.items()]
    return f"rows that dispatch sends per token to other ranks, by dedup: {', '.join(parts)}"
