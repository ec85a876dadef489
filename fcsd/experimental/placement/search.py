"""Searches the placement of experts that leaves the fewest rows to the busiest group of ranks (HierMoE §IV-C).

The search is greedy. It takes the swap of two experts that saves most, counts again, and ends when no swap saves more
time than the move of the two experts takes. The paper takes one swap per layer and update (eq. 10) and does not weigh
the move. ``greedy`` with ``most=1`` and an objective whose ``move`` is 0 does the same.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fcsd.experimental.placement.pair_counts import Level, LevelCounts, count, split
from fcsd.parallel.expert.placement import Placement

_GAMMA = 10  # the paper's default; any value from 5 to 19 gave it the same speed (§V-E)


def busiest(rows: Tensor) -> Tensor:
    """The rows of the busiest group by a smooth maximum (HierMoE eq. 11, gamma = 10), ``fp64 [..., groups] -> [...]``.

    It also falls if a group falls that is almost as busy.
    """
    most = rows.amax(dim=-1, keepdim=True).clamp(min=1)  # without a row the result is 0
    return most.squeeze(-1) * (rows / most).pow(_GAMMA).sum(dim=-1).pow(1 / _GAMMA)


@dataclass(frozen=True)
class Objective:
    """What a placement costs. The unit is a row that a rank receives from another rank of its node.

    Attributes:
        levels: what is counted, from the outermost groups to the innermost. After the rows that ranks receive there
            can be the pairs of tokens and experts of each rank, to which the work of its experts is proportional.
        move: the cost of moving an expert between two ranks of a node.
        far: how many times as much it costs between nodes, which are the groups of the first level if they are fewer
            than the ranks.
    """

    levels: tuple[Level, ...]
    move: float = 0.0
    far: float = 1.0

    def cost(self, rows: Sequence[Tensor]) -> Tensor:
        """The cost of dispatch: the sum over levels of HierMoE eq. (3), without the constants.

        Args:
            rows: for each level the rows of its groups, ``[..., groups]``.

        Returns: fp64 ``[...]``.
        """
        costs = [level.weight * busiest(of.double()) for level, of in zip(self.levels, rows, strict=True)]
        return torch.stack(costs).sum(dim=0)


class Swap(NamedTuple):
    """Two experts that exchange their places, and the cost that this saves, the move included."""

    one: int
    other: int
    saved: float


def best_swap(counts: Sequence[LevelCounts], placement: Placement, objective: Objective) -> Swap | None:
    """The swap that saves most (HierMoE eq. 10), the first one of equals; None if no swap saves anything.

    Args:
        counts: for each level the counts of all ranks, on the CPU.
    """
    experts = placement.experts
    position = placement.positions(torch.arange(experts))
    one, other = torch.triu_indices(experts, experts, 1)
    apart = position[one] // placement.slots != position[other] // placement.slots
    one, other = one[apart], other[apart]
    if not len(one):
        return None
    after = []
    for level, (rows, change) in zip(objective.levels, counts, strict=True):
        group = position // (experts // level.groups)
        swapped = rows.repeat(len(one), 1)
        swapped.scatter_add_(1, group[other].unsqueeze(1), change[one, other].unsqueeze(1))
        swapped.scatter_add_(1, group[one].unsqueeze(1), change[other, one].unsqueeze(1))
        after.append(swapped)
    nodes = objective.levels[0].groups
    outermost = position // (experts // nodes)
    far = (outermost[one] != outermost[other]) & (nodes < placement.ranks)
    move = torch.where(far, objective.far, 1.0).double() * objective.move
    saved = objective.cost([rows for rows, _ in counts]) - objective.cost(after) - move
    best = int(saved.numpy().argmax())
    return Swap(int(one[best]), int(other[best]), float(saved[best])) if saved[best] > 0 else None


class Ranks(NamedTuple):
    """How the ranks of a run search together. By default there is one rank.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        sum: sums a vector of integers over all ranks.
        everywhere: runs a function on every rank, and returns the results of all ranks on every rank.
    """

    rank: int = 0
    size: int = 1
    sum: Callable[[Tensor], Tensor] = lambda counts: counts
    everywhere: Callable[[Callable[[], list[Swap | None]]], list[list[Swap | None]]] = lambda decide: [decide()]


def greedy(
    chosen: Sequence[Tensor],
    placements: Sequence[Placement],
    objective: Objective,
    most: int | None = None,
    together: Ranks = Ranks(),  # noqa: B008 (it is immutable)
) -> tuple[list[Placement], int]:
    """Better placements for the routing of several layers, found by one swap after the other in each layer.

    Every rank calls this with its own tokens. The ranks sum their counts. Each layer is decided by one rank, which
    shares the work, and ranks with different processors cannot come to different decisions.

    Args:
        chosen: for each layer the experts that this rank's tokens chose, ``[tokens, top_k]``.
        placements: for each layer where its experts are.
        most: the largest number of swaps in a layer; None is no limit.

    Returns: the placements, and the number of swaps in all layers together.
    """
    placements, left, total = list(placements), list(range(len(chosen))), 0
    for _ in range(most) if most is not None else itertools.count():
        own = [count(chosen[k], placements[k], objective.levels) for k in left]
        if not own:
            break
        parts = together.sum(torch.cat(own)).split([len(counts) for counts in own])
        mine = list(zip(parts, left, strict=True))[together.rank :: together.size]
        decided = together.everywhere(partial(_best_swaps, mine, placements, objective))
        for n, k in enumerate(left.copy()):
            swap = decided[n % together.size][n // together.size]
            if swap is None:
                left.remove(k)
            else:
                placements[k] = placements[k].swapped(swap.one, swap.other)
                total += 1
    return placements, total


def _best_swaps(
    layers: Sequence[tuple[Tensor, int]], placements: Sequence[Placement], objective: Objective
) -> list[Swap | None]:
    """``best_swap`` of some layers, each given by its counts and its index."""
    return [
        best_swap(split(counts.cpu(), placements[k].experts, objective.levels), placements[k], objective)
        for counts, k in layers
    ]
