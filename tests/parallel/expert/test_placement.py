"""Every expert has one rank and one slot, and positions are in the order of ranks and slots."""

import pytest
import torch
from blocks import interleaved

from fcsd.parallel.expert.placement import Placement


@pytest.mark.parametrize(
    "placement", [Placement(8, 1), Placement(8, 2), Placement(6, 3), Placement(4, 4), interleaved(8, 2)]
)
def test_every_expert_has_one_place(placement: Placement) -> None:
    experts = range(placement.experts)
    places = [(placement.rank(expert), placement.slot(expert)) for expert in experts]
    assert sorted(places) == [(rank, slot) for rank in range(placement.ranks) for slot in range(placement.slots)]
    positions = placement.positions(torch.arange(placement.experts, dtype=torch.int32))
    assert positions.tolist() == [rank * placement.slots + slot for rank, slot in places]
    assert positions.dtype == torch.int32
    assert [placement.numbers[position] for position in positions] == list(experts)


@pytest.mark.parametrize("placement", [Placement(4, 2), Placement(4, 2, (2, 3, 1, 0))])
def test_counts_are_ordered_by_position(placement: Placement) -> None:
    counts = torch.tensor([5, 0, 2, 7])
    ordered = placement.by_position(counts)
    assert [ordered[position] for position in placement.positions(torch.arange(4))] == counts.tolist()


def test_two_experts_exchange_their_places() -> None:
    before = Placement(6, 3)
    after = before.swapped(0, 5)
    assert after.numbers == (5, 1, 2, 3, 4, 0)
    assert (after.rank(0), after.slot(0), after.rank(5), after.slot(5)) == (2, 1, 0, 0)
    assert after.swapped(5, 0).numbers == before.numbers
