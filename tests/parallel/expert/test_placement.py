"""Every expert has one rank and one slot, and positions are in the order of ranks and slots."""

import pytest
import torch

from fcsd.parallel.expert.placement import Placement


@pytest.mark.parametrize("experts, ranks", [(8, 1), (8, 2), (6, 3), (4, 4)])
def test_every_expert_has_one_place(experts: int, ranks: int) -> None:
    placement = Placement(experts, ranks)
    places = [(placement.rank(expert), placement.slot(expert)) for expert in range(experts)]
    assert sorted(places) == [(rank, slot) for rank in range(ranks) for slot in range(placement.slots)]
    positions = placement.positions(torch.arange(experts)).tolist()
    assert positions == [rank * placement.slots + slot for rank, slot in places]


def test_counts_are_ordered_by_position() -> None:
    placement = Placement(experts=4, ranks=2)
    counts = torch.tensor([5, 0, 2, 7])
    ordered = placement.by_position(counts)
    assert [ordered[position] for position in placement.positions(torch.arange(4))] == counts.tolist()
