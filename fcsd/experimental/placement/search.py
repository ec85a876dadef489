"""Searches the placement of experts that leaves the fewest rows to the busiest group of ranks (HierMoE §IV-C).

The search is greedy. It takes the swap of two experts that saves most, counts again, and ends when no swap saves more
time than the move of the two experts takes. The paper takes one swap per layer and update (eq. 10) and does not weigh
the move. ``greedy`` with ``most=1`` and an objective whose ``move`` is 0 does the same.

What every possible swap would change in the rows of each group is counted by ``count``. HierMoE §IV-B goes through four
cases for every token and pair of experts. Here the same numbers are two matrix products for each level: one counts the
tokens that a group gains with an expert, the other those that it loses.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fcsd.parallel.expert.placement import Placement

_GAMMA = 10  # the paper's default; any value from 5 to 19 gave it the same speed (§V-E)
_CHUNK = 2**14  # tokens that are counted at a time, so that the memory does not grow with the batch


class Level(NamedTuple):
    """What a search counts on a level of the hierarchy.

    Attributes:
        groups: the number of groups of ranks.
        weight: the time that a row of the busiest group takes, in units of the time that a rank needs to receive a row
            from a rank of its own node.
        deduplicated: whether a group has one row for each token, or one for each pair of token and expert.
    """

    groups: int
    weight: float
    deduplicated: bool = True


class LevelCounts(NamedTuple):
    """The rows of the groups of one level, and how swaps change them. All are integers.

    Attributes:
        rows: ``[groups]``, the rows that the experts of each group receive: HierMoE's p (eq. 7).
        change: ``[experts, experts]``. ``change[a, b]`` rows are added to the group of expert b if a takes the place of
            b and b that of a. It is 0 if both are in one group.
    """

    rows: Tensor
    change: Tensor


def count(chosen: Tensor, placement: Placement, levels: Sequence[Level]) -> Tensor:
    """The counts of every level as one vector of integers, so that ranks can sum theirs; ``split`` parts it again.

    Args:
        chosen: ``[tokens, top_k]``, the numbers of the experts that each token chose.
        placement: where the experts are.
        levels: what is counted; the number of groups of each divides ``placement.experts``.

    Returns: int32 ``[sum of groups + levels * experts * experts]``, on the device of ``chosen``.
    """
    experts = placement.experts
    position = placement.positions(torch.arange(experts, device=chosen.device))
    found = []
    for number, _, deduplicated in levels:
        group = position // (experts // number)
        rows = torch.zeros(number, device=chosen.device, dtype=torch.int32)
        change = torch.zeros(experts, experts, device=chosen.device, dtype=torch.int32)
        for part in chosen.split(_CHUNK):
            # Sums of zeros and ones in fp32 are exact below 2**24, and a chunk has fewer tokens.
            choice = torch.zeros(len(part), experts, device=chosen.device).scatter_(1, part.long(), 1.0)
            of_part = _deduplicated(choice, group, number) if deduplicated else _pairs(choice, group, number)
            rows += of_part.rows.int()
            change += of_part.change.int()
        found += [rows, change.masked_fill_(group.unsqueeze(1) == group, 0).view(-1)]
    return torch.cat(found)


def split(counts: Tensor, experts: int, levels: Sequence[Level]) -> list[LevelCounts]:
    """The vector of ``count`` parted into levels."""
    parts = counts.split([size for level in levels for size in (level.groups, experts * experts)])
    return [
        LevelCounts(rows, change.view(experts, experts)) for rows, change in zip(parts[::2], parts[1::2], strict=True)
    ]


def _deduplicated(choice: Tensor, group: Tensor, groups: int) -> LevelCounts:
    """The counts if a group receives one row for each token that chose any of its experts.

    If a takes the place of b, the group of b gains the tokens that chose a and none of the group's experts. It loses
    the tokens for which b was the only expert of the group, unless they chose a.

    Args:
        choice: fp32 ``[tokens, experts]``, 1 where a token chose an expert and 0 elsewhere.
        group: ``[experts]``, the group of each expert.
    """
    of_group = torch.zeros(len(choice), groups, device=choice.device).index_add_(1, group, choice)
    beside = of_group[:, group]  # [tokens, experts]: how many experts of this expert's group the token chose
    only, none = choice * (beside == 1), (beside == 0).float()
    gained = choice.T @ none
    lost = only.sum(dim=0).unsqueeze(1) - only.T @ choice
    return LevelCounts((of_group > 0).sum(dim=0), gained - lost.T)


def _pairs(choice: Tensor, group: Tensor, groups: int) -> LevelCounts:
    """The counts if a group receives one row for each pair of a token and one of the group's experts."""
    rows = choice.sum(dim=0)
    of_group = torch.zeros(groups, device=choice.device).index_add_(0, group, rows)
    return LevelCounts(of_group, rows.unsqueeze(1) - rows)


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
