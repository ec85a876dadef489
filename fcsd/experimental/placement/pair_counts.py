"""Counts what every possible swap of two experts would change in the rows that each group of ranks receives.

HierMoE §IV-B goes through four cases for every token and pair of experts. Here the same numbers are two matrix products
for each level: one counts the tokens that a group gains with an expert, the other those that it loses.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fcsd.parallel.expert.placement import Placement

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
