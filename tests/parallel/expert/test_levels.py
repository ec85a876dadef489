"""The rows of each level, and the share of rows that deduplication saves, equal those that are counted one by one."""

import itertools
import math

import pytest
import torch
from benchmarks.train.step.row_counts import pairs_sent, rows_sent
from torch import Tensor

from fcsd.parallel.expert.levels import Levels, all_groups, one_level, row_matrices, tokens_by_group, two_levels
from fcsd.parallel.expert.records import Layout


def expected_groups(experts: int, top_k: int, groups: int) -> float:
    """The mean number of different groups of experts that a token is sent to, if its experts are random.

    The groups have equal sizes and their number divides ``experts`` (HierMoE Table II counts the duplicates, which are
    ``1 - expected_groups / top_k``).
    """
    return groups * (1 - math.comb(experts - experts // groups, top_k) / math.comb(experts, top_k))


def choices(ranks: int, tokens: int, experts: int, top_k: int) -> Tensor:
    """Random choices of distinct experts, ``[ranks, tokens, top_k]``."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(ranks, tokens, experts, generator=generator).argsort(dim=-1)[..., :top_k]


def duplicates(positions: Tensor, experts: int, groups: int) -> float:
    """The share of the (token, expert) pairs, from 0 to 1, whose row deduplication saves (HierMoE Table II).

    Args:
        positions: ``[..., tokens, top_k]``, the positions of the chosen experts.
        groups: the number of groups that receive one row per token each.
    """
    return 1 - int(tokens_by_group(positions, experts, groups).sum()) / positions.numel()


def sent_one_by_one(positions: Tensor, experts: int, levels: Levels) -> list[list[list[int]]]:
    """``[depth][senders][receivers]``, by following every token through the levels."""
    ranks = levels.ranks
    places = list(itertools.product(*(range(size) for size in levels.sizes)))  # of each rank, at each level
    found = [[[0] * ranks for _ in range(ranks)] for _ in levels.sizes]
    for sender, tokens in enumerate(positions.tolist()):
        for token in tokens:
            at = {sender}  # the ranks that hold the token's row
            goals = {places[expert // (experts // ranks)] for expert in token}
            for level in range(levels.depth):
                reached = set()
                for rank in at:
                    here = [goal for goal in goals if goal[:level] == places[rank][:level]] if level else list(goals)
                    for step in {goal[level] for goal in here}:
                        receiver = places.index((*places[rank][:level], step, *places[rank][level + 1 :]))
                        found[level][rank][receiver] += 1
                        reached.add(receiver)
                at = reached
            assert {places[rank] for rank in at} == goals
    return found


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)])
def test_the_rows_of_every_level_are_those_of_every_token(sizes: tuple[int, ...]) -> None:
    levels = Levels(sizes)
    experts = 2 * levels.ranks
    positions = choices(levels.ranks, 9, experts, top_k=3)
    expected = sent_one_by_one(positions, experts, levels)
    assert row_matrices(all_groups(positions, experts, levels), levels).tolist() == expected
    ranks = range(levels.ranks)
    assert rows_sent(positions, experts, levels) == [
        sum(matrix[a][b] for a in ranks for b in ranks if a != b) for matrix in expected
    ]


def test_without_deduplication_every_pair_is_a_row() -> None:
    positions = choices(4, 9, 8, top_k=3)
    expected = sum(
        expert // 2 != rank for rank, tokens in enumerate(positions.tolist()) for t in tokens for expert in t
    )
    assert pairs_sent(positions, 8, ranks=4) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("choices", [1, 6, 9])
def test_records_begin_at_multiples_of_64_bytes(dtype: torch.dtype, choices: int) -> None:
    layout = Layout(24, choices, dtype)
    assert layout.record_bytes % 64 == 0 and layout.new(3, torch.device("cpu")).stride(0) % 16 == 0


def test_the_two_arrangements_that_a_recipe_names() -> None:
    assert one_level(8) == Levels((8,))
    assert two_levels(8, node_size=2) == Levels((4, 2))
    assert [two_levels(8, node_size=2).choices(level, experts=16, top_k=8) for level in (0, 1)] == [4, 2]
    assert [two_levels(8, 2).groups(level) for level in (0, 1)] == [4, 8]
    assert [two_levels(8, 2).span(level, 64) for level in (0, 1)] == [16, 8]


def test_groups_are_counted_as_in_all_possible_choices() -> None:
    chosen = list(itertools.combinations(range(8), 3))
    counted = sum(len({expert // 2 for expert in experts}) for experts in chosen) / len(chosen)
    assert expected_groups(8, 3, 4) == pytest.approx(counted)


# HierMoE Table II: per cent of duplicates for top_k 2, 4, 6, 8, by number of groups. The paper does not say how many
# experts there are; 256 fit.
TABLE_II = {32: (2, 4, 7, 9), 16: (3, 9, 14, 18), 8: (6, 17, 27, 34), 4: (12, 32, 46, 55)}


@pytest.mark.parametrize("groups", TABLE_II)
def test_random_routing_has_the_duplicates_of_the_paper(groups: int) -> None:
    for top_k, published in zip((2, 4, 6, 8), TABLE_II[groups], strict=True):
        expected = 1 - expected_groups(256, top_k, groups) / top_k
        assert 100 * expected == pytest.approx(published, abs=1.1)
        counted = duplicates(choices(1, 4000, 256, top_k), 256, groups)
        assert counted == pytest.approx(expected, abs=0.015)
