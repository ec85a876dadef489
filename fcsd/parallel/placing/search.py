"""Searches the placement of experts that leaves the fewest rows to the busiest group of ranks (HierMoE §IV-C).

The search is greedy. It takes the swap of two experts that saves most, counts again, and ends when no swap saves more
time than the move of the two experts takes. The paper takes one swap per layer and update (eq. 10) and does not weigh
the move. ``greedy`` with ``most=1`` and an objective whose ``move`` is 0 does the same.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fcsd.parallel.expert.placement import Placement
from fcsd.parallel.placing.pair_counts import LevelCounts, count, split

T = TypeVar("T")
Balance = Literal["smooth-max", "max", "log-sum-exp"]

_GAMMA = 10  # the paper's default; any value from 5 to 19 gave it the same speed (§V-E)


def busiest(rows: Tensor, balance: Balance) -> Tensor:
    """The rows of the busiest group, ``fp64 [..., groups] -> [...]``.

    ``smooth-max`` (HierMoE eq. 11, with gamma = 10) and ``log-sum-exp`` also fall if a group falls that is almost as
    busy. The exponential makes ``log-sum-exp`` differ from ``max`` only by groups that are a few rows apart.
    """
    if balance == "max":
        return rows.amax(dim=-1)
    if balance == "log-sum-exp":
        return rows.logsumexp(dim=-1)
    most = rows.amax(dim=-1, keepdim=True).clamp(min=1)  # without a row the result is 0
    return most.squeeze(-1) * (rows / most).pow(_GAMMA).sum(dim=-1).pow(1 / _GAMMA)


class Level(NamedTuple):
    """A level of the hierarchy.

    Attributes:
        groups: the number of groups of ranks.
        weight: the time that a row of the busiest group takes, in units of the time that a rank needs to receive a row
            from a rank of its own node.
    """

    groups: int
    weight: float


@dataclass(frozen=True)
class Objective:
    """What a placement costs. The unit is a row that a rank receives from another rank of its node.

    Attributes:
        levels: the levels of the hierarchy, from the outermost to the innermost.
        deduplicated: see ``count``.
        balance: the function that stands for the maximum over groups.
        move: the cost of moving an expert between two ranks of a node.
        far: how many times as much it costs between nodes, which are the groups of the first of several levels.
    """

    levels: tuple[Level, ...]
    deduplicated: bool
    balance: Balance = "smooth-max"
    move: float = 0.0
    far: float = 1.0

    @property
    def groups(self) -> tuple[int, ...]:
        """The number of groups of each level."""
        return tuple(level.groups for level in self.levels)

    def cost(self, rows: Sequence[Tensor]) -> Tensor:
        """The cost of dispatch: the sum over levels of HierMoE eq. (3), without the constants.

        Args:
            rows: for each level the rows of its groups, ``[..., groups]``.

        Returns: fp64 ``[...]``.
        """
        costs = [level.weight * busiest(of.double(), self.balance) for level, of in zip(self.levels, rows, strict=True)]
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
    outermost = position // (experts // objective.levels[0].groups)
    far = (outermost[one] != outermost[other]) & (len(objective.levels) > 1)
    move = torch.where(far, objective.far, 1.0).double() * objective.move
    saved = objective.cost([rows for rows, _ in counts]) - objective.cost(after) - move
    best = int(saved.numpy().argmax())
    return Swap(int(one[best]), int(other[best]), float(saved[best])) if saved[best] > 0 else None


def greedy(
    chosen: Sequence[Tensor],
    placements: Sequence[Placement],
    objective: Objective,
    most: int | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda counts: counts,
    on_first: Callable[[Callable[[], list[Swap | None]]], list[Swap | None]] = lambda decide: decide(),
) -> tuple[list[Placement], int]:
    """Better placements for the routing of several layers, found by one swap after the other in each layer.

    Every rank calls this with its own tokens. The ranks sum their counts, and rank 0 decides, so that ranks with other
    processors cannot come to other decisions.

    Args:
        chosen: for each layer the experts that this rank's tokens chose, ``[tokens, top_k]``.
        placements: for each layer where its experts are.
        most: the largest number of swaps in a layer; None is no limit.
        sum_over_ranks: sums a vector of integers over all ranks.
        on_first: runs a function on rank 0, and returns its result on every rank.

    Returns: the placements, and the number of swaps in all layers together.
    """
    placements, left, total = list(placements), list(range(len(chosen))), 0
    for _ in range(most) if most is not None else itertools.count():
        own = [count(chosen[k], placements[k], objective.groups, objective.deduplicated) for k in left]
        if not own:
            break
        parts = sum_over_ranks(torch.cat(own)).split([len(counts) for counts in own])

        def decide(parts: Sequence[Tensor] = parts, layers: Sequence[int] = tuple(left)) -> list[Swap | None]:
            return [
                best_swap(split(part.cpu(), placements[k].experts, objective.groups), placements[k], objective)
                for part, k in zip(parts, layers, strict=True)
            ]

        swaps = {k: swap for k, swap in zip(left, on_first(decide), strict=True) if swap is not None}
        for k, swap in swaps.items():
            placements[k] = placements[k].swapped(swap.one, swap.other)
        left, total = list(swaps), total + len(swaps)
    return placements, total
