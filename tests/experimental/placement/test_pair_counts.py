"""The counts of every swap equal those of the placement after the swap, counted token by token."""

import itertools

import pytest
import torch
from blocks import interleaved
from torch import Tensor

from fcsd.experimental.placement import search
from fcsd.experimental.placement.search import Level, count, split
from fcsd.parallel.expert.levels import tokens_by_group
from fcsd.parallel.expert.placement import Placement

EXPERTS, RANKS, GROUPS = 8, 4, (2, 4)


def choices(tokens: int, top_k: int) -> Tensor:
    """Choices of distinct experts that are not equally likely, ``[tokens, top_k]``."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(EXPERTS, generator=generator) ** 3
    return torch.multinomial(weights.expand(tokens, -1), top_k, generator=generator)


def rows_of(chosen: Tensor, placement: Placement, groups: int, deduplicated: bool) -> list[int]:
    """The rows of each group: the slow reference."""
    positions = placement.positions(chosen)
    if deduplicated:
        return tokens_by_group(positions, EXPERTS, groups).tolist()
    return (positions // (EXPERTS // groups)).flatten().bincount(minlength=groups).tolist()


@pytest.mark.parametrize("deduplicated", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_counts_of_every_swap(monkeypatch: pytest.MonkeyPatch, top_k: int, deduplicated: bool) -> None:
    monkeypatch.setattr(search, "_CHUNK", 50)  # so that several chunks are summed
    chosen, levels = choices(120, top_k), [Level(groups, 1.0, deduplicated) for groups in GROUPS]
    for placement in (Placement(EXPERTS, RANKS), interleaved(EXPERTS, RANKS)):
        counts = split(count(chosen.to(torch.int16), placement, levels), EXPERTS, levels)
        for groups, (rows, change) in zip(GROUPS, counts, strict=True):
            assert rows.tolist() == rows_of(chosen, placement, groups, deduplicated)
            of = [placement.position(expert) // (EXPERTS // groups) for expert in range(EXPERTS)]
            for one, other in itertools.combinations(range(EXPERTS), 2):
                predicted = rows.clone()
                predicted[of[other]] += change[one, other]
                predicted[of[one]] += change[other, one]
                after = placement.swapped(one, other)
                assert predicted.tolist() == rows_of(chosen, after, groups, deduplicated), (one, other)


def test_ranks_can_sum_their_counts() -> None:
    chosen, placement = choices(90, 3), Placement(EXPERTS, RANKS)
    levels = [Level(2, 1.0), Level(RANKS, 1.0, deduplicated=False)]
    parts = [count(part, placement, levels) for part in chosen.split(40)]
    assert torch.equal(torch.stack(parts).sum(dim=0), count(chosen, placement, levels))
