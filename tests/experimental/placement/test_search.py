"""The greedy search finds what an exhaustive one finds, on a trained router, and ends where moves cost more."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from studies.placement import study
from torch import Tensor

from fcsd.experimental.placement.search import Level, Objective, Ranks, best_swap, busiest, count, greedy, split
from fcsd.parallel.expert.levels import tokens_by_group
from fcsd.parallel.expert.placement import Placement

EXPERTS = 8


@pytest.fixture(scope="module")
def routing() -> list[Tensor]:
    """What 16384 held-out tokens choose in each layer of the bundled teacher, ``[tokens, 2]`` each."""
    found, experts = study.choices(16384)
    assert experts == EXPERTS and len(found) == 9
    return found


def cost(objective: Objective, chosen: Tensor, placement: Placement) -> float:
    """The cost of a placement, counted token by token: the slow reference."""
    positions = placement.positions(chosen.long())
    rows = [
        tokens_by_group(positions, EXPERTS, level.groups)
        if level.deduplicated
        else (positions // (EXPERTS // level.groups)).flatten().bincount(minlength=level.groups)
        for level in objective.levels
    ]
    return float(objective.cost(rows))


@pytest.mark.parametrize("ranks", [2, 4])
def test_greedy_reaches_the_exhaustive_reduction_on_other_tokens(routing: list[Tensor], ranks: int) -> None:
    seen, unseen = [chosen[:8192] for chosen in routing], [chosen[8192:] for chosen in routing]
    start = [Placement(EXPERTS, ranks)] * len(routing)
    found, _ = greedy(seen, start, study.objectives(ranks)["smooth-max"])
    best = [study.exhaustive(chosen, EXPERTS, ranks) for chosen in seen]

    def rows(placements: list[Placement]) -> int:
        each = zip(placements, unseen, strict=True)
        return sum(int(tokens_by_group(placed.positions(chosen), EXPERTS, ranks).max()) for placed, chosen in each)

    before, by_greedy, by_exhaustion = rows(start), rows(found), rows(best)
    assert before - by_exhaustion > 0.05 * before
    assert before - by_greedy >= 0.95 * (before - by_exhaustion)


def test_a_swap_that_saves_nothing_is_none() -> None:
    """Where a token chooses all experts, every placement costs the same."""
    start = Placement(EXPERTS, 2)
    assert greedy([torch.arange(EXPERTS)[None]], [start], Objective((Level(2, 1.0),)), most=1) == ([start], 0)


TWO_LEVELS = (Level(2, 4.0), Level(4, 1.0))
WORK = Level(4, 0.7, deduplicated=False)


@pytest.mark.parametrize(
    "levels",
    [(Level(4, 1.0),), TWO_LEVELS, (Level(4, 1.0), WORK), (*TWO_LEVELS, WORK)],
    ids=["ranks", "nodes", "ranks and work", "nodes and work"],
)
def test_the_best_swap_is_the_best_of_all(routing: list[Tensor], levels: Any) -> None:
    far, move = 3.0, 40.0
    objective = Objective(levels, move, far)
    chosen, placement = routing[4][:1000], Placement(EXPERTS, 4, (5, 0, 1, 2, 7, 3, 6, 4))
    before, saved = cost(objective, chosen, placement), {}
    for one, other in itertools.combinations(range(EXPERTS), 2):
        if placement.rank(one) != placement.rank(other):
            between_nodes = levels[0].groups == 2 and placement.rank(one) // 2 != placement.rank(other) // 2
            after = cost(objective, chosen, placement.swapped(one, other))
            saved[one, other] = before - after - move * (far if between_nodes else 1)
    swap = best_swap(split(count(chosen, placement, levels), EXPERTS, levels), placement, objective)
    best = max(saved.values())
    assert (swap is None) == (best <= 0)
    if swap is not None:
        assert saved[swap.one, swap.other] == pytest.approx(best) and swap.saved == pytest.approx(best)


def test_swaps_end_where_the_move_costs_more(routing: list[Tensor]) -> None:
    chosen, start = [one[:4096] for one in routing], [Placement(EXPERTS, 4)] * len(routing)
    free, dear = (Objective((Level(4, 1.0),), move=move) for move in (0.0, 60.0))
    found, swaps = greedy(chosen, start, dear)
    assert 0 < swaps < greedy(chosen, start, free)[1]
    for one, before, after in zip(chosen, start, found, strict=True):
        changed = sum(a != b for a, b in zip(before.numbers, after.numbers, strict=True))
        assert cost(free, one, before) - cost(free, one, after) >= changed / 2 * 60.0
    assert greedy(chosen, start, Objective((Level(4, 1.0),), move=math.inf)) == (start, 0)
    assert greedy(chosen, start, free, most=1)[1] <= len(chosen)  # the paper's mode: one swap in each layer


def test_two_ranks_find_what_one_finds(routing: list[Tensor]) -> None:
    objective, start = Objective(TWO_LEVELS), [Placement(EXPERTS, 4)] * 3
    one, other = [chosen[:1500] for chosen in routing[:3]], [chosen[1500:4000] for chosen in routing[:3]]
    alone = greedy([torch.cat(parts) for parts in zip(one, other, strict=True)], start, objective)
    barrier, answers = threading.Barrier(2, timeout=60), [None, None]

    def rank(number: int, chosen: list[Tensor]) -> Any:
        def everywhere(function: Any) -> Any:
            answers[number] = function()
            barrier.wait()
            everyone = list(answers)
            barrier.wait()
            return everyone

        together = Ranks(number, 2, lambda own: torch.stack(everywhere(lambda: own)).sum(dim=0), everywhere)
        return greedy(chosen, start, objective, None, together)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rank, range(2), (one, other)))
    assert found == [alone, alone]


def test_the_function_that_stands_for_the_maximum() -> None:
    rows = torch.tensor([[300.0, 400.0], [0.0, 0.0]], dtype=torch.float64)
    # Equation (11) is the norm of order gamma.
    assert busiest(rows)[0].item() == pytest.approx((300.0**10 + 400.0**10) ** 0.1)
    assert busiest(rows)[1] == 0
