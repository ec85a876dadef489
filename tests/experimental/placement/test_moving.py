"""Every element of an expert is at its new place after a move, however the ranks divide the tensor."""

import pytest
import torch

from fcsd.experimental.placement.moving import Interval, plan
from fcsd.parallel.expert.placement import Placement

EXPERTS, SIZE = 8, 6  # of each tensor, an expert has this many elements
HALVES = [Interval(0, 11), Interval(0, 11), Interval(11, 24), Interval(11, 24)]  # the border is inside of an expert


def held_by_four(name: str) -> list[dict[str, Interval]]:
    """Ranks 0 and 1 divide the experts, and so do 2 and 3. Of ``divided`` each of them has one half, else the whole."""
    whole = Interval(0, EXPERTS // 2 * SIZE)
    return [{name: whole if name == "whole" else half} for half in HALVES]


def contents(placement: Placement, rank: int, interval: Interval) -> torch.Tensor:
    """The elements of a rank, where element i of expert e has the value 100 e + i."""
    mine = placement.numbers[rank * placement.slots : (rank + 1) * placement.slots]
    values = torch.cat([100.0 * expert + torch.arange(SIZE) for expert in mine])
    return values[interval.start : interval.stop].clone()


@pytest.mark.parametrize("name", ["whole", "divided"])
def test_pieces_cover_what_moves_once(name: str) -> None:
    before, after, held = Placement(EXPERTS, 2), Placement(EXPERTS, 2, (0, 5, 2, 3, 4, 1, 7, 6)), held_by_four(name)
    pieces = plan(before, after, held, {name: SIZE})
    new = [contents(before, rank % 2, held[rank][name]) for rank in range(4)]
    for piece in pieces:
        source = contents(before, piece.source % 2, held[piece.source][name])
        first = piece.start - held[piece.source][name].start
        goal_first = piece.goal_start - held[piece.goal][name].start
        new[piece.goal][goal_first : goal_first + piece.count] = source[first : first + piece.count]
    for rank in range(4):
        assert torch.equal(new[rank], contents(after, rank % 2, held[rank][name])), rank
    replicas = 2 if name == "whole" else 1
    assert sum(piece.count for piece in pieces) == 4 * SIZE * replicas  # four experts move, and nothing else
    if name == "whole":
        assert all(piece.source // 2 == piece.goal // 2 for piece in pieces)  # a group needs no other group
