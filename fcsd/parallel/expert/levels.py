"""Says how the ranks of an expert-parallel group form levels, and counts the rows that travel at each level.

With one level, a token sends one row to each rank that holds any of its experts. With two levels, it sends one row to
each such *node*. A relay rank of that node receives the row, and forwards it to the ranks of the node (HierMoE §III-A).
The relay has the same place in its node as the sender has in its own, so the ranks of a node share this work.

A *group* of level i is a set of ranks that agree in their place at the levels 0 to i: a node at the first of two
levels, a rank at the last level. The positions of its experts are contiguous (``placement.py``).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fcsd.errors import ConfigError


@dataclass(frozen=True)
class Levels:
    """How the ranks of a group form levels.

    Args:
        sizes: how many ranks exchange rows with each other at each level, from the outermost level to the innermost.
            Their product is the number of ranks. ``(ranks,)`` has one level, ``(nodes, ranks of a node)`` two.
    """

    sizes: tuple[int, ...]

    @property
    def depth(self) -> int:
        """The number of levels (HierMoE's d)."""
        return len(self.sizes)

    @property
    def ranks(self) -> int:
        """The number of ranks of the expert-parallel group."""
        return math.prod(self.sizes)

    def choices(self, level: int, experts: int, top_k: int) -> int:
        """How many of a token's ``top_k`` experts one row can be for that is sent to a group of a level."""
        return min(top_k, self.span(level, experts))

    def groups(self, level: int) -> int:
        """The number of groups of a level (HierMoE's U)."""
        return math.prod(self.sizes[: level + 1])

    def span(self, level: int, experts: int) -> int:
        """How many of a layer's ``experts`` each group of a level holds."""
        return experts // self.groups(level)


def one_level(ranks: int) -> Levels:
    """Every rank exchanges rows with every other rank."""
    return Levels((ranks,))


def two_levels(ranks: int, node_size: int) -> Levels:
    """Rows travel between nodes of ``node_size`` neighbouring ranks first, and inside a node afterwards.

    Raises:
        ConfigError: the ranks are not several whole nodes of several ranks.
    """
    if ranks % node_size or not 1 < node_size < ranks:
        raise ConfigError(
            f"{ranks} ranks are not several nodes of {node_size} ranks each",
            hint="use a node size above 1 that divides the ranks, or deduplicate by rank",
        )
    return Levels((ranks // node_size, node_size))


def tokens_by_group(positions: Tensor, experts: int, groups: int) -> Tensor:
    """How many tokens have at least one expert in each group (HierMoE eq. 7).

    Args:
        positions: ``[..., tokens, top_k]``, the positions of the chosen experts.

    Returns: ``[..., groups]``, int64.
    """
    chosen = positions.new_zeros(*positions.shape[:-1], groups, dtype=torch.bool)
    return chosen.scatter_(-1, positions.long() // (experts // groups), True).sum(dim=-2)


def all_groups(positions: Tensor, experts: int, levels: Levels) -> Tensor:
    """``tokens_by_group`` of every level, one level after the other: ``[..., groups of all levels]``, int64."""
    each = [tokens_by_group(positions, experts, levels.groups(level)) for level in range(levels.depth)]
    return torch.cat(each, dim=-1)


def row_matrices(tokens: Tensor, levels: Levels) -> Tensor:
    """How many rows each rank sends to each rank at each level.

    At level i a rank holds rows of all senders that have the same place as itself at the levels i and above. It sends
    each row to one rank of every group in which the row has experts.

    Args:
        tokens: ``[ranks, groups of all levels]``, the numbers of ``all_groups`` for the tokens of each rank.

    Returns: ``[depth, senders, receivers]``, int64. A rank's rows to itself are included.
    """
    matrices = []
    for level, part in enumerate(tokens.split([levels.groups(level) for level in range(levels.depth)], dim=1)):
        # A rank is numbered (before, here, after): its places at the levels before this one, at it, and after it.
        here = levels.sizes[level]
        before, after = levels.groups(level) // here, levels.ranks // levels.groups(level)
        held = part.reshape(before, here, after, before, here).sum(dim=0)  # [here, after; before, here] of the group
        sent = held.permute(2, 0, 1, 3)  # [before, here, after; here of the receiver]
        same_before = torch.eye(before, dtype=sent.dtype, device=sent.device)[:, None, None, :, None, None]
        same_after = torch.eye(after, dtype=sent.dtype, device=sent.device)[None, None, :, None, None, :]
        matrix = sent[:, :, :, None, :, None] * same_before * same_after
        matrices.append(matrix.reshape(levels.ranks, levels.ranks))
    return torch.stack(matrices)
